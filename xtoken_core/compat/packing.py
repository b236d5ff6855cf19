"""Packing of padded tensors into jagged ones, by the names and rules of the data planes that others know.

Per-token columns travel as jagged tensors (`torch.jagged`: rows of their own length in one buffer, ragged along
dimension 1), so that padding is paid for only where a rectangle is needed: in `materialize`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Integer, Shaped
from tensordict import TensorDict
from torch import Tensor

from xtoken_core.data_plane.jagged import jagged_from_rows, jagged_from_values, row_bounds


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


def maybe_pack_jagged(val: Shaped[Tensor, ...], lengths: Integer[Tensor, " N"]) -> Tensor:
    """Make a tensor jagged if it looks like a per-token column: `val.shape == (N, max(lengths), ...)`.

    Args:
        val: Any tensor.
        lengths: `[N]` valid steps of each row.

    Returns:
        The jagged tensor, or `val` (contiguous) where the shape does not fit. Gradients flow through either.
    """
    return _strip_if_fits(val, lengths.tolist(), exact=True)


def pack_per_token_field(val: Shaped[Tensor, ...], lengths: Integer[Tensor, " N"]) -> Tensor:
    """Make a known per-token column jagged, even if it is padded beyond the longest row.

    Sequence-parallel models round the width up, so `val` may be wider than `max(lengths)`; the rest is dropped.

    Args:
        val: `[N, S, ...]` with `S >= max(lengths)`.
        lengths: `[N]` valid steps of each row.

    Returns:
        The jagged tensor, or `val` (contiguous) if it has fewer than two dimensions, another number of rows, or is too
        narrow. Gradients flow through either.
    """
    return _strip_if_fits(val, lengths.tolist(), exact=False)


def _strip_if_fits(val: Tensor, lengths: list[int], *, exact: bool) -> Tensor:
    if lengths and val.dim() >= 2 and val.shape[0] == len(lengths):
        longest = max(lengths)
        if val.shape[1] == longest or (val.shape[1] > longest and not exact):
            return _strip(val, lengths)
    return val.contiguous()


def pack_jagged_fields(fields: dict[str, Tensor | np.ndarray], *, lengths: Tensor | None) -> TensorDict:
    """Pack columns for the wire: per-token tensors become jagged, all others pass through.

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
            packed[name] = value.contiguous() if host is None else _strip_if_fits(value, host, exact=True)
        elif isinstance(value, np.ndarray) and value.dtype == object:
            packed[name] = value
        else:
            kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"column {name!r} must be a tensor or an array of objects, not {kind}")
        if host is None and value.ndim:
            rows = max(rows, value.shape[0])
    return TensorDict(packed, batch_size=[rows])


def response_from_nested(full: Tensor, response_mask: Tensor) -> Tensor:
    """Return the response's part of values over prompt and response, shifted left by one.

    A model's value at position `i` belongs to token `i + 1`, so the response's values start one position
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
