"""Packing of columns to the batch that a model reads: all samples of a micro-batch in one row, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.data_plane.buffers import column_values
from xtoken_core.packing import PackedRow, sample_indices
from xtoken_core.wire import Column
from xtoken_services.common.batches.padding import padded_column

CHUNK_IDS = (schema.STUDENT_CHUNK_ID, schema.TEACHER_CHUNK_ID)


class PackedBatch(NamedTuple):
    """A micro-batch of N samples, packed.

    Attributes:
        data: `[1, width]` tensors for per-token columns, `[1, P]` for pairs, `[N]` for scalars, object columns as
            arrays; chunks are numbered over the whole row.
        rows: The layout of each side: the student's, then each teacher's.
    """

    data: dict[str, Any]
    rows: tuple[PackedRow, ...]


def packed_batch(
    columns: Mapping[str, Column], *, widths: Sequence[int], pad_ids: Sequence[int], dead_samples: Sequence[int] = ()
) -> PackedBatch:
    """Return a micro-batch as tensors, packed; what follows the last sample is padding.

    Args:
        columns: Rows of the micro-batch, in the plan's order.
        widths: Width of each side's row: the student's, then each teacher's.
        pad_ids: The token id that pads each side.
        dead_samples: Samples to mask: their sample mask is set to 0.
    """
    teachers = len(widths) - 1
    pads = dict(schema.pad_values(teachers)) | {schema.INPUT_IDS.name: pad_ids[0]}
    axes = schema.axis_of(teachers)
    student = row_of_side(columns[schema.INPUT_IDS.name], widths[0])
    rows = [student]
    data: dict[str, Any] = {schema.STUDENT_SAMPLE.name: student.samples()}
    for teacher, (width, pad_id) in enumerate(zip(widths[1:], pad_ids[1:], strict=True)):
        ids = schema.field_name(schema.TEACHER_INPUT_IDS, teacher)
        pads[ids] = pad_id
        # A teacher with the student's tokenizer has no tokens of its own.
        rows.append(row_of_side(columns[ids], width) if ids in columns else student)
        data[schema.field_name(schema.TEACHER_SAMPLE, teacher)] = rows[-1].samples()
    for name, column in columns.items():
        # One value per sample, per token of a side (padded to the side's width), or per chunk of a teacher (`side` is
        # None: there is no such width, and the row has all chunks of all samples).
        axis, owner = axes.get(name, ("sample", None))
        if axis == "sample":
            data[name] = padded_column(column, 0, 0)
            continue
        side = {"student": 0, "teacher": (owner or 0) + 1}.get(axis)
        width = sum(_lengths(column)) if side is None else widths[side]
        data[name] = padded_row(column_values(column), width, pads.get(name, 0))
    for teacher in range(teachers):
        _number_chunks(data, columns, teacher)
    if dead_samples:
        # The tensor lies over received memory, which is read-only and may be shared.
        mask = data[schema.SAMPLE_MASK.name].clone()
        mask[torch.tensor(list(dead_samples))] = 0.0
        data[schema.SAMPLE_MASK.name] = mask
    return PackedBatch(data, tuple(rows))


def row_of_side(column: Column, width: int) -> PackedRow:
    """Return the layout of a jagged column's rows in one of `width` tokens."""
    return PackedRow(tuple(_lengths(column)), width)


def padded_row(values: Tensor, width: int, fill: float) -> Tensor:
    """Return `[1, width]`: the values `[n]`, padded on the right."""
    row = values.new_full((1, width), fill)
    row[0, : len(values)] = values
    return row


def _number_chunks(data: dict[str, Any], columns: Mapping[str, Column], teacher: int) -> None:
    """Number a teacher's chunks over the whole row instead of per sample, and add the sample of each."""
    pairs = columns.get(schema.field_name(schema.PAIR_VALID, teacher))
    if pairs is None:
        return
    counts = tuple(_lengths(pairs))
    data[schema.field_name(schema.PAIR_SAMPLE, teacher)] = sample_indices(counts, sum(counts))
    first = torch.tensor([0, *itertools.accumulate(counts)])
    samples = (schema.STUDENT_SAMPLE.name, schema.field_name(schema.TEACHER_SAMPLE, teacher))
    for field, sample in zip(CHUNK_IDS, samples, strict=True):
        name = schema.field_name(field, teacher)
        if name in data:
            ids = data[name]
            data[name] = torch.where(ids >= 0, ids + first[data[sample]], ids)


def _lengths(column: Column) -> list[int]:
    assert column.offsets is not None
    return [after - before for before, after in itertools.pairwise(column.offsets.tolist())]
