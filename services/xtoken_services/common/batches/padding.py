"""Padding of columns to the batch that a model reads, at the widths of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xtoken_core import schema
from xtoken_core.data_plane.layout import materialize
from xtoken_core.data_plane.tensors import tensordict_from_columns
from xtoken_core.wire import Column


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
    by_width: dict[int, dict[str, Column]] = {}
    for name, column in columns.items():
        axis, owner = axes.get(name, ("sample", None))
        side = {"student": 0, "teacher": (owner or 0) + 1}.get(axis)
        width = 0 if side is None else widths[side]
        # One conversion for all columns of a width: a few large calls instead of one per column.
        by_width.setdefault(width, {})[name] = column
    for width, group in by_width.items():
        batch.update(materialize(tensordict_from_columns(group), "padded", pads, width))
    if dead_rows:
        mask = batch[schema.SAMPLE_MASK.name].clone()
        mask[torch.tensor(list(dead_rows))] = 0.0
        batch[schema.SAMPLE_MASK.name] = mask
    return batch
