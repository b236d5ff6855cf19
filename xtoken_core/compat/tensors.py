"""Conversion between TensorDicts and wire columns, over shared buffers where dtype and layout allow it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from xtoken_core.compat.layout import object_rows
from xtoken_core.data_plane.buffers import DTYPES, column_values
from xtoken_core.data_plane.jagged import is_ragged_along_dim1, jagged_from_values, row_bounds
from xtoken_core.wire.columns import Column, offsets_from_lengths
from xtoken_core.wire.objects import object_column, object_values

NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
