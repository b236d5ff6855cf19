"""Columns: dtype, ragged lengths and values, described by a header and carried by buffers beside it.

A dense column has one buffer (its values, `rows` times `item_shape`). A jagged or an object column has two: int64
offsets (`rows + 1` of them, starting at 0, never falling) and values; its offsets count items of `item_shape` along the
ragged axis, or bytes for an object column, whose rows are one msgpack value each. Numbers are little-endian.

`unpack_columns` is the validator of everything that comes from a peer or a file.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from xtoken_core.wire.bounds import MAX_DIMS, MAX_EXTENT, MAX_NAME, MAX_ROWS, MAX_UNIT_BYTES
from xtoken_core.wire.errors import QueueError

if sys.byteorder != "little":
    raise RuntimeError("the wire format is little-endian, and so must this machine be")

Buffer = bytes | bytearray | memoryview
Kind = Literal["dense", "jagged", "object"]

ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
OFFSET_BYTES = 8
BOOLS = bytes(byte & 1 for byte in range(256))
"""Translation of every byte to its lowest bit."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXTENT)]
Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ColumnHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a column in a header; its buffers follow in the order of the heads."""

    name: Name
    kind: Kind
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROWS)]
    item_shape: Annotated[list[Extent], msgspec.Meta(max_length=MAX_DIMS)] = []


class Column(msgspec.Struct, frozen=True):
    """Column with its buffers.

    Attributes:
        kind: `dense`, `jagged` or `object`.
        dtype: A key of `ITEM_SIZES`; empty for an object column.
        rows: Number of rows.
        item_shape: Shape of a row (dense) or of one step along the ragged axis (jagged).
        values: The values' bytes.
        offsets: `rows + 1` offsets as a view of int64; None for a dense column.
    """

    kind: Kind
    dtype: str
    rows: int
    item_shape: tuple[int, ...]
    values: memoryview
    offsets: memoryview | None = None

    @property
    def unit(self) -> int:
        """Return the bytes of one item, the unit of offsets (or a dense row)."""
        return unit_bytes(self.kind, self.dtype, self.item_shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        return self.values.nbytes + (self.offsets.nbytes if self.offsets is not None else 0)

    def row_bounds(self, row: int) -> tuple[int, int]:
        """Return the first and last (exclusive) byte of a row in `values`."""
        unit = self.unit
        if self.offsets is None:
            return row * unit, (row + 1) * unit
        return self.offsets[row] * unit, self.offsets[row + 1] * unit


def unit_bytes(kind: Kind, dtype: str, item_shape: Sequence[int]) -> int:
    """Return the bytes of one step of an offset.

    Raises:
        QueueError: `bad_request` for an unknown dtype.
    """
    if kind == "object":
        return 1
    size = ITEM_SIZES.get(dtype)
    if size is None:
        raise QueueError("bad_request", f"unknown dtype {dtype!r}: one of {', '.join(ITEM_SIZES)} is possible")
    for extent in item_shape:
        size *= extent
    return size


def bytes_view(buffer: Buffer) -> memoryview:
    """Return a flat view of a buffer's bytes."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def offsets_from_lengths(lengths: Sequence[int]) -> memoryview:
    """Return `rows + 1` offsets of rows with these lengths."""
    return memoryview(array("q", itertools.accumulate(lengths, initial=0)))


def pack_columns(columns: dict[str, Column]) -> tuple[list[ColumnHead], list[memoryview]]:
    """Return the heads for a header, and the buffers to send after it."""
    heads: list[ColumnHead] = []
    buffers: list[memoryview] = []
    for name, column in columns.items():
        heads.append(ColumnHead(name, column.kind, column.dtype, column.rows, list(column.item_shape)))
        if column.offsets is not None:
            buffers.append(column.offsets.cast("B"))
        buffers.append(column.values)
    return heads, buffers


def unpack_columns(heads: Sequence[ColumnHead], buffers: Sequence[Buffer]) -> dict[str, Column]:
    """Return columns over their heads and buffers, with every bound checked and nothing copied.

    Raises:
        QueueError: `bad_request` with the column's name if sizes, offsets or the number of buffers disagree.
    """
    columns: dict[str, Column] = {}
    rest = iter(buffers)
    for head in heads:
        if head.name in columns:
            raise QueueError("bad_request", f"column {head.name!r} is there twice")
        try:
            offsets = None if head.kind == "dense" else next(rest)
            values = next(rest)
        except StopIteration:
            raise QueueError("bad_request", f"column {head.name!r} lacks a buffer") from None
        columns[head.name] = _checked(head, values, offsets)
    # A surplus buffer would be held in memory, and belong to nothing that is ever dropped.
    if next(rest, None) is not None:
        raise QueueError("bad_request", "there are more buffers than the columns need")
    return columns


def _checked(head: ColumnHead, values: Buffer, offsets: Buffer | None) -> Column:
    unit = unit_bytes(head.kind, head.dtype, head.item_shape)
    if not 0 <= unit <= MAX_UNIT_BYTES:
        raise _misfit(head, f"an item has at most {MAX_UNIT_BYTES} bytes, not {unit}")
    view = bytes_view(values)
    rows, shape = head.rows, tuple(head.item_shape)
    if offsets is None:
        if view.nbytes != unit * rows:
            raise _misfit(head, f"{rows} rows of {unit} bytes, but {view.nbytes} came")
        bounds = None
    else:
        bounds = _checked_offsets(head, offsets, unit, view.nbytes)
    if head.dtype == "bool" and (raw := view.tobytes()).translate(BOOLS) != raw:
        raise _misfit(head, "a bool is one byte of 0 or 1")
    return Column(head.kind, head.dtype, rows, shape, view, bounds)


def _checked_offsets(head: ColumnHead, offsets: Buffer, unit: int, nbytes: int) -> memoryview:
    if head.kind == "object" and (head.dtype or head.item_shape):
        raise _misfit(head, "an object column has neither dtype nor item_shape")
    if unit == 0:  # offsets of items without bytes could be any number, as no values bound them
        raise _misfit(head, "the items of a jagged column have at least one byte")
    counts = bytes_view(offsets)
    if counts.nbytes != OFFSET_BYTES * (head.rows + 1):
        raise _misfit(head, f"{head.rows} rows need {head.rows + 1} int64 offsets")
    # A view: offsets are as long as a batch has rows, and are sent on as they came.
    bounds = counts.cast("q")
    flat = bounds.tolist()  # compared in C with its sorted copy instead of by a Python loop
    if flat[0] != 0 or flat != sorted(flat) or flat[-1] * unit != nbytes:
        raise _misfit(head, "offsets must start at 0, never fall and end with the values")
    return bounds


def _misfit(head: ColumnHead, why: str) -> QueueError:
    return QueueError("bad_request", f"column {head.name!r}: {why}")


def select_rows(column: Column, rows: Sequence[int]) -> Column:
    """Return rows of a column: a view where they are adjacent (the column itself for all), otherwise one gather."""
    if not rows or (not isinstance(rows, range) and not _adjacent(rows)):
        return gather_rows([(column, rows)])
    if len(rows) == column.rows:
        return column
    values = column.values[column.row_bounds(rows[0])[0] : column.row_bounds(rows[-1])[1]]
    offsets = column.offsets
    if offsets is not None:
        # Offsets begin at 0 in every column, so those of a part are made anew; the values stay a view.
        first = offsets[rows[0]]
        offsets = memoryview(array("q", [bound - first for bound in offsets[rows[0] : rows[-1] + 2].tolist()]))
    return Column(column.kind, column.dtype, len(rows), column.item_shape, values, offsets)


def gather_rows(parts: Sequence[tuple[Column, Sequence[int]]]) -> Column:
    """Concatenate rows of several columns of the same kind, dtype and item shape, with one copy of the values.

    Raises:
        QueueError: `conflict` if they differ.
    """
    first = parts[0][0]
    key = (first.kind, first.dtype, first.item_shape)
    unit = first.unit
    pieces: list[memoryview] = []
    lengths: list[int] = []
    for column, rows in parts:
        if column is not first and (column.kind, column.dtype, column.item_shape) != key:
            raise QueueError("conflict", "rows of one field differ in kind, dtype or item shape")
        values, offsets = column.values, column.offsets
        if offsets is None:
            # Views; the bytes are copied once, by the join below.
            pieces += [values[row * unit : (row + 1) * unit] for row in rows]
            continue
        for row in rows:
            start, stop = offsets[row], offsets[row + 1]
            lengths.append(stop - start)
            pieces.append(values[start * unit : stop * unit])
    total = sum(len(rows) for _, rows in parts)
    bounds = None if first.offsets is None else offsets_from_lengths(lengths)
    return Column(first.kind, first.dtype, total, first.item_shape, memoryview(b"".join(pieces)), bounds)


def _adjacent(rows: Sequence[int]) -> bool:
    # The ends first: most lists that are not adjacent fail there, without a comparison of all.
    return rows[-1] - rows[0] + 1 == len(rows) and list(rows) == list(range(rows[0], rows[0] + len(rows)))
