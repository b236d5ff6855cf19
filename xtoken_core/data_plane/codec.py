"""Between the layout on the wire and the one in a trainer.

Per-token columns travel as jagged tensors (`torch.jagged`: rows of their own length in one buffer, ragged along
dimension 1), so that padding is paid for only where a rectangle is needed: in `materialize`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Integer, Shaped
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from xtoken_core.data_plane.batch import BatchedDataDict
from xtoken_core.data_plane.jagged import is_ragged_along_dim1, jagged_from_rows, jagged_from_values, row_bounds
from xtoken_core.data_plane.schema import Layout


def to_nested_by_length(padded: Shaped[Tensor, ...], lengths: Integer[Tensor, ...]) -> Tensor:
    """Strip the right-padding of a rectangular tensor.

    Args:
        padded: `[N, S, ...]`, any dtype.
        lengths: `[N]` valid steps of each row, `0 <= lengths[i] <= S`; moved to the host once if on a GPU.

    Returns:
        A jagged tensor whose row `i` is `padded[i, :lengths[i], ...]`; a view where nothing is stripped.

    Raises:
        ValueError: If shapes or lengths do not fit.
    """
    if padded.dim() < 2:
        raise ValueError(f"a per-token tensor has the shape (N, S, ...), not {tuple(padded.shape)}")
    n = padded.shape[0]
    if lengths.shape != (n,):
        raise ValueError(f"{n} rows need lengths of the shape ({n},), not {tuple(lengths.shape)}")
    return _strip(padded, lengths.tolist())


def _strip(padded: Tensor, lengths: list[int]) -> Tensor:
    n, s = padded.shape[:2]
    if any(not 0 <= length <= s for length in lengths):
        raise ValueError(f"lengths must lie in 0 .. {s}, the width of the rows; got {lengths}")
    if lengths == [s] * n:
        return jagged_from_values(padded.flatten(0, 1), lengths)
    rows = [padded[row, :length] for row, length in enumerate(lengths)]
    return jagged_from_rows(rows, empty=padded.new_empty((0, *padded.shape[2:])))


def stack_or_nest(tensors: list[Tensor]) -> Tensor:
    """Stack rows of equal shape; make a jagged tensor of ragged ones.

    Args:
        tensors: One tensor per row, equal in every dimension but at most one.

    Returns:
        `[N, ...]` if all rows have the same shape, a jagged tensor otherwise; `torch.empty(0)` without rows.
    """
    if not tensors:
        return torch.empty(0)
    if len({row.shape for row in tensors}) == 1:
        return torch.stack(tensors)
    if tensors[0].dim() and len({row.shape[1:] for row in tensors}) == 1:
        return jagged_from_rows(tensors, empty=tensors[0][:0])
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def unwrap_wire_stripped_payload(item: Any) -> Any:
    """The payload of a `NonTensorData` that may have lost it on another system's wire.

    Some peers send only the tensors of a TensorDict, so that a `NonTensorData` arrives as an empty `TensorDict` without
    batch dimensions. Exactly that becomes None; a payload that is still there is returned; anything else is unchanged.
    """
    kept = getattr(item, "_non_tensordict", None)
    if isinstance(kept, dict) and "data" in kept:
        return kept["data"]
    if isinstance(item, TensorDictBase) and item.batch_dims == 0 and not list(item.keys()):
        return None
    return item


def maybe_pack_jagged(val: Shaped[Tensor, ...], lengths: Integer[Tensor, " N"]) -> Tensor:
    """Make `val` jagged if it looks like a per-token column: `val.shape == (N, max(lengths), ...)`.

    Args:
        val: Any tensor.
        lengths: `[N]` valid steps of each row.

    Returns:
        The jagged tensor, or `val` as it is (detached, contiguous) where the shape does not fit.
    """
    return _strip_if_fits(val, lengths.tolist(), exact=True)


def pack_per_token_field(val: Shaped[Tensor, ...], lengths: Integer[Tensor, " N"]) -> Tensor:
    """Make a column that is known to be per-token jagged, though it may be padded beyond the longest row.

    Sequence-parallel models round the width up, so `val` may be wider than `max(lengths)`; what is beyond is dropped.

    Args:
        val: `[N, S, ...]` with `S >= max(lengths)`.
        lengths: `[N]` valid steps of each row.

    Returns:
        The jagged tensor, or `val` as it is (detached, contiguous) if it has fewer than two dimensions, another number
        of rows, or is too narrow.
    """
    return _strip_if_fits(val, lengths.tolist(), exact=False)


def _strip_if_fits(val: Tensor, lengths: list[int], *, exact: bool) -> Tensor:
    val = val.detach()
    if lengths and val.dim() >= 2 and val.shape[0] == len(lengths):
        longest = max(lengths)
        if val.shape[1] == longest or (val.shape[1] > longest and not exact):
            return _strip(val, lengths)
    return val.contiguous()


def pack_jagged_fields(fields: dict[str, Tensor | np.ndarray], *, lengths: Tensor | None) -> TensorDict:
    """Lay columns out for the wire: per-token tensors become jagged, all else passes through.

    Args:
        fields: Column name to tensor or object array.
        lengths: `[N]` valid steps of each row, by which `maybe_pack_jagged` decides; None leaves every tensor
            rectangular.

    Returns:
        A TensorDict with `batch_size=[N]`. Without `lengths`, N is the columns' own number of rows (0 if there are
        none): a TensorDict refuses columns that are longer than its batch.

    Raises:
        TypeError: If a column is neither a tensor nor an object array.
    """
    host = lengths.tolist() if lengths is not None else None
    packed: dict[str, Any] = {}
    rows = len(host) if host is not None else 0
    for name, value in fields.items():
        if isinstance(value, Tensor):
            packed[name] = value.detach().contiguous() if host is None else _strip_if_fits(value, host, exact=True)
        elif isinstance(value, np.ndarray) and value.dtype == object:
            packed[name] = value
        else:
            kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"column {name!r} must be a tensor or an array of objects, not {kind}")
        if host is None and value.ndim:
            rows = max(rows, value.shape[0])
    return TensorDict(packed, batch_size=[rows])


def response_from_nested(full: Tensor, response_mask: Tensor) -> Tensor:
    """The response's part of values over prompt and response, shifted left by one.

    The value that a model gives at position `i` belongs to token `i + 1`, so the response's values start one position
    before its first token.

    Args:
        full: Jagged `[N, prompt + response, ...]`.
        response_mask: Jagged `[N, response]`; only its row lengths are read.

    Returns:
        Jagged `[N, response, ...]`.

    Raises:
        ValueError: If the numbers of rows differ, or a response has no token before it to be predicted from.
    """
    bounds = row_bounds(full)
    responses = [stop - start for start, stop in row_bounds(response_mask)]
    if len(bounds) != len(responses):
        raise ValueError(f"{len(bounds)} rows of values but {len(responses)} response masks")
    rows, values = [], full.values()
    for row, ((start, stop), length) in enumerate(zip(bounds, responses, strict=True)):
        if length and stop - length - 1 < start:
            raise ValueError(
                f"row {row}: a response of {length} tokens needs a prompt before it; {stop - start} in all"
            )
        rows.append(values[stop - length - 1 : stop - 1] if length else values[stop:stop])
    return jagged_from_rows(rows, empty=values[:0])


def materialize(
    td: TensorDictBase,
    layout: Layout = "padded",
    pad_value_dict: dict[str, int | float] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict[Any]:
    """Turn a TensorDict from the wire into the batch that a trainer reads.

    Args:
        td: Columns as they came.
        layout: `padded` makes jagged columns rectangular; `jagged` leaves them.
        pad_value_dict: The pad value of each column, 0 where none is given.
        pad_to_seqlen: With `padded`, width of dimension 1 at least: rows of equal length may have come as a rectangle,
            so it holds for every column of two dimensions or more. 0: the longest row.

    Returns:
        Rectangular tensors (or jagged ones), and object arrays `[N]` for non-tensor columns.

    Raises:
        TypeError: If a column is neither.
    """
    pads = pad_value_dict or {}
    out: BatchedDataDict[Any] = BatchedDataDict()
    for name, value in td.items():
        if isinstance(value, Tensor):
            if layout == "padded":
                out[name] = _padded(value, pads.get(name, 0), pad_to_seqlen)
            else:
                out[name] = value
        elif isinstance(value, TensorDictBase | NonTensorData):
            out[name] = object_rows(name, value)
        else:
            raise TypeError(f"column {name!r} is a {type(value).__name__}: only tensors and objects travel")
    return out


def object_rows(name: str, value: Any) -> np.ndarray:
    """The rows of a non-tensor column as an object array `[N]`.

    Raises:
        TypeError: If it is a TensorDict with columns of its own.
    """
    if isinstance(value, LazyStackedTensorDict) and (isinstance(value, NonTensorStack) or not list(value.keys())):
        rows = [_payload(item) for item in value.tensordicts]
    elif isinstance(value, NonTensorData):
        payload = value.data
        if isinstance(payload, np.ndarray) and payload.dtype == object and payload.shape[:1] == tuple(value.batch_size):
            rows = list(payload)
        else:
            rows = [payload] * value.batch_size.numel()
    elif isinstance(value, TensorDictBase) and not list(value.keys()):
        rows = [None] * value.batch_size.numel()
    else:
        raise TypeError(f"column {name!r} is a nested {type(value).__name__}: only tensors and objects travel")
    out = np.empty(len(rows), dtype=object)
    for row, item in enumerate(rows):
        out[row] = item
    return out


def _payload(item: Any) -> Any:
    return item.tolist() if isinstance(item, NonTensorStack) else unwrap_wire_stripped_payload(item)


def _padded(value: Tensor, fill: int | float, width: int) -> Tensor:
    if not value.is_nested:
        missing = width - value.shape[1] if value.dim() > 1 else 0
        if missing <= 0:
            return value
        return torch.nn.functional.pad(value, [0, 0] * (value.dim() - 2) + [0, missing], value=fill)
    if not is_ragged_along_dim1(value):
        return _padded(torch.nested.to_padded_tensor(value, padding=fill), fill, width)
    values, bounds = value.values(), row_bounds(value)
    width = max(width, max((stop - start for start, stop in bounds), default=0))
    out = values.new_full((len(bounds), width, *values.shape[1:]), fill)
    for row, (start, stop) in enumerate(bounds):
        out[row, : stop - start] = values[start:stop]
    return out
