"""TensorDicts between wire columns and the trainer's layout: jagged columns to padded tensors, objects to arrays.

Buffers are shared where dtype and layout allow it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from xtoken_core.data_plane.batch import BatchedDataDict
from xtoken_core.data_plane.buffers import DTYPES, column_values
from xtoken_core.data_plane.jagged import is_ragged_along_dim1, jagged_from_values, row_bounds
from xtoken_core.wire.columns import Column, offsets_from_lengths
from xtoken_core.wire.objects import object_column, object_values

Layout = Literal["padded", "jagged"]
"""`padded`: rectangular, filled up with a pad value. `jagged`: rows of their own length, in one buffer."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
        pad_value_dict: Pad value by column, 0 where none is given.
        pad_to_seqlen: With `padded`, least width of columns that came jagged; 0 for that of the longest row.

    Returns:
        Rectangular tensors (or jagged ones), and object arrays `[N]` for non-tensor columns. Tensors that came
        rectangular are passed through.

    Raises:
        ValueError: If there is no such layout.
        TypeError: If a column is neither a tensor nor an object.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout {layout!r} is not one of {', '.join(get_args(Layout))}")
    pads = pad_value_dict or {}
    out: BatchedDataDict[Any] = BatchedDataDict()
    for name, value in td.items():
        if isinstance(value, Tensor):
            pad = layout == "padded" and value.is_nested
            out[name] = _padded(value, pads.get(name, 0), pad_to_seqlen) if pad else value
        elif isinstance(value, TensorDictBase | NonTensorData):
            out[name] = object_rows(name, value)
        else:
            raise TypeError(f"column {name!r} is a {type(value).__name__}: only tensors and objects travel")
    return out


def unwrap_wire_stripped_payload(item: Any) -> Any:
    """Return None for a `NonTensorData` that another system's wire has stripped, and anything else unchanged.

    Some peers send only the tensors of a TensorDict, so that a `NonTensorData` arrives as an empty `TensorDict` without
    batch dimensions and without a payload. Exactly that becomes None.
    """
    stripped = (
        isinstance(item, TensorDictBase)
        and item.batch_dims == 0
        and not list(item.keys())
        and not getattr(item, "_non_tensordict", None)
    )
    return None if stripped else item


def object_rows(name: str, value: Any) -> np.ndarray:
    """Return the rows of a non-tensor column as an object array `[N]`.

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
    if isinstance(item, NonTensorStack):
        return item.tolist()
    kept = getattr(item, "_non_tensordict", None)
    if isinstance(kept, dict) and "data" in kept:
        return kept["data"]
    return unwrap_wire_stripped_payload(item)


def _padded(value: Tensor, fill: int | float, width: int) -> Tensor:
    """Pad a nested tensor along its ragged dimension to its longest row, and at least to `width`."""
    if not is_ragged_along_dim1(value):
        padded = torch.nested.to_padded_tensor(value, padding=fill)
        ragged: int = getattr(value, "_ragged_idx", 1)
        missing = max(width - padded.shape[ragged], 0)
        # F.pad counts dimensions from the last one.
        return torch.nn.functional.pad(padded, [0, 0] * (padded.dim() - 1 - ragged) + [0, missing], value=fill)
    values, bounds = value.values(), row_bounds(value)
    width = max(width, max((stop - start for start, stop in bounds), default=0))
    out = values.new_full((len(bounds), width, *values.shape[1:]), fill)
    for row, (start, stop) in enumerate(bounds):
        out[row, : stop - start] = values[start:stop]
    return out


def columns_from_tensordict(td: TensorDictBase) -> dict[str, Column]:
    """Return the columns of a TensorDict: rectangular ones dense, nested ones jagged, non-tensor ones objects.

    Contiguous host tensors are shared, not copied: they must not change until the columns were sent.

    Args:
        td: One batch dimension; its leaves are tensors or `NonTensorData` / `NonTensorStack` of plain values.

    Raises:
        TypeError: If a leaf is a TensorDict, or a tensor of an unsupported dtype or raggedness.
        QueueError: If an object is not a bounded msgpack value.
    """
    return {name: _column(name, value) for name, value in td.items()}


def tensordict_from_columns(columns: Mapping[str, Column]) -> TensorDict:
    """Return a TensorDict over the columns' memory, with `batch_size=[rows]`.

    Tensors over received bytes must not be written; `materialize` copies jagged columns.

    Raises:
        ValueError: If columns differ in their number of rows.
    """
    counts = {name: column.rows for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the columns of a batch differ in their number of rows: {counts}")
    leaves = {name: _leaf(column) for name, column in columns.items()}
    return TensorDict(leaves, batch_size=[next(iter(counts.values()), 0)])


def _column(name: str, value: Any) -> Column:
    if not isinstance(value, Tensor):
        return object_column(list(object_rows(name, value)))
    if not value.is_nested:
        value = value.detach()
        return Column("dense", _dtype_name(name, value), value.shape[0], tuple(value.shape[1:]), _bytes(value))
    if not is_ragged_along_dim1(value):
        rows = list(value.detach().unbind())
        if len({row.shape[1:] for row in rows}) > 1:
            raise TypeError(f"column {name!r} is ragged along another dimension than the first of its rows")
        return _jagged_column(name, torch.cat(rows), [row.shape[0] for row in rows])
    bounds, values = row_bounds(value), value.values().detach()
    lengths = [stop - start for start, stop in bounds]
    if any(a[1] != b[0] for a, b in itertools.pairwise([(0, 0), *bounds, (len(values), 0)])):  # rows with holes between
        values = torch.cat([values[:0], *(values[start:stop] for start, stop in bounds)])
    return _jagged_column(name, values, lengths)


def _jagged_column(name: str, values: Tensor, lengths: Sequence[int]) -> Column:
    shape = tuple(values.shape[1:])
    return Column(
        "jagged", _dtype_name(name, values), len(lengths), shape, _bytes(values), offsets_from_lengths(lengths)
    )


def _dtype_name(name: str, value: Tensor) -> str:
    if value.dtype not in NAMES:
        raise TypeError(f"column {name!r}: {value.dtype} does not travel; one of {', '.join(NAMES.values())} does")
    return NAMES[value.dtype]


def _bytes(value: Tensor) -> memoryview:
    flat = value.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _leaf(column: Column) -> Tensor | NonTensorStack | NonTensorData:
    if column.kind == "object":
        rows = object_values(column)
        if not rows:
            return NonTensorData([], batch_size=[0])
        return NonTensorStack(*(NonTensorData(row) for row in rows))
    values = column_values(column)
    if column.offsets is None:
        return values
    return jagged_from_values(values, [column.offsets[r + 1] - column.offsets[r] for r in range(column.rows)])
