"""Padding of columns to the batch that a model reads, at the widths of the plan."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.data_plane.buffers import column_values
from xtoken_core.wire import Column
from xtoken_core.wire.objects import object_values


def padded_batch(
    columns: Mapping[str, Column], *, widths: Sequence[int], pad_ids: Sequence[int], dead_rows: Sequence[int] = ()
) -> dict[str, Any]:
    """Return a micro-batch as tensors, right-padded.

    Args:
        columns: Rows of the micro-batch, in the plan's order.
        widths: Padded width of each side: the student's, then each teacher's.
        pad_ids: The token id that pads each side.
        dead_rows: Rows to mask: their sample mask is set to 0.

    Returns:
        `[B, width]` tensors for per-token columns, `[B, P]` for pairs, `[B]` for scalars, object columns as arrays.
    """
    teachers = len(widths) - 1
    axes, pads = schema.axis_of(teachers), dict(schema.pad_values(teachers))
    pads[schema.INPUT_IDS.name] = pad_ids[0]
    for teacher, pad_id in enumerate(pad_ids[1:]):
        pads[schema.field_name(schema.TEACHER_INPUT_IDS, teacher)] = pad_id
    batch: dict[str, Any] = {}
    for name, column in columns.items():
        axis, owner = axes.get(name, ("sample", None))
        side = {"student": 0, "teacher": (owner or 0) + 1}.get(axis)
        batch[name] = padded_column(column, 0 if side is None else widths[side], pads.get(name, 0))
    if dead_rows:
        mask = batch[schema.SAMPLE_MASK.name].clone()
        mask[torch.tensor(list(dead_rows))] = 0.0
        batch[schema.SAMPLE_MASK.name] = mask
    return batch


def padded_column(column: Column, width: int, fill: float) -> Tensor | np.ndarray:
    """Return a column as a tensor, or as an array of objects; jagged rows are padded on the right.

    Args:
        column: The column; a dense one is returned over its own memory.
        width: Least width of a jagged column: its longest row may be longer.
        fill: What jagged rows are padded with.
    """
    if column.kind == "object":
        objects = np.empty(column.rows, dtype=object)
        for row, value in enumerate(object_values(column)):  # one by one: numpy would make a matrix of equal lists
            objects[row] = value
        return objects
    values = column_values(column)
    if column.offsets is None:
        return values
    bounds = list(itertools.pairwise(column.offsets.tolist()))
    width = max([width, *(stop - start for start, stop in bounds)])
    out = values.new_full((column.rows, width, *values.shape[1:]), fill)
    for row, (start, stop) in enumerate(bounds):
        out[row, : stop - start] = values[start:stop]
    return out
