"""Columns of the queue as arrays, row by row, and columns from such rows."""

from collections.abc import Mapping, Sequence

import numpy as np

from xtoken_core.wire import Column
from xtoken_core.wire.columns import offsets_from_lengths


def row_of(column: Column, row: int) -> np.ndarray:
    """Return a row: `[n]` of a jagged column, `[]` of a dense one."""
    begin, end = column.row_bounds(row)
    values = np.frombuffer(column.values[begin:end], dtype=column.dtype)
    return values if column.offsets is not None else values[0]


def rows_of(columns: Mapping[str, Column]) -> list[dict[str, np.ndarray]]:
    """Return every row, by column name."""
    count = next(iter(columns.values())).rows if columns else 0
    return [{name: row_of(column, row) for name, column in columns.items()} for row in range(count)]


def columns_of(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Column]:
    """Return columns of these rows: jagged for arrays `[n]`, dense for `[]`."""
    columns = {}
    for name in rows[0] if rows else ():
        parts = [row[name] for row in rows]
        values = memoryview(np.concatenate([np.atleast_1d(part) for part in parts])).cast("B")
        offsets = offsets_from_lengths([len(part) for part in parts]) if parts[0].ndim else None
        kind = "dense" if offsets is None else "jagged"
        columns[name] = Column(kind, str(parts[0].dtype), len(rows), (), values, offsets)
    return columns
