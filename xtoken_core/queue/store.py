"""Columns of samples, kept as the whole buffers in which they came.

Nothing is copied when a batch arrives or is split. A batch is kept as long as one of its rows is; one that is mostly
dead is compacted, so that a single slow sample does not keep all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from xtoken_core.queue.budget import BATCH_BYTES, COLUMN_BYTES, ENTRY_BYTES
from xtoken_core.wire import Column, QueueError, gather_rows, select_rows

COMPACT_BYTES = 1 << 16
COMPACT_RATIO = 4


class Batch:
    """Columns that came together, and the row of each sample that still has one here."""

    __slots__ = ("columns", "nbytes", "row_of", "rows")

    def __init__(self, columns: dict[str, Column], rows: int, row_of: dict[int, int]) -> None:
        self.columns = columns
        self.rows = rows
        self.row_of = row_of
        self.nbytes = sum(column.nbytes for column in columns.values())

    def row_bytes(self) -> list[int]:
        """Return the bytes of each row's values in all columns."""
        total = [0] * self.rows
        for column in self.columns.values():
            bounds = range(self.rows + 1) if column.offsets is None else column.offsets.tolist()
            total = [
                n + (stop - start) * column.unit for n, start, stop in zip(total, bounds[:-1], bounds[1:], strict=True)
            ]
        return total


Table = dict[int, Batch]
Run = tuple[Batch, Sequence[int]]


class Store:
    """Columns of the samples of one partition.

    Samples whose fields came together share a table: by id, the batch that has their row.

    Attributes:
        nbytes: Bytes of all buffers held.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._entry_count = self._column_count = self._batch_count = 0
        self._tables: dict[tuple[str, ...], Table] = {}

    @property
    def overhead(self) -> int:
        """Return the bookkeeping of the columns in bytes."""
        return self._entry_count * ENTRY_BYTES + self._column_count * COLUMN_BYTES + self._batch_count * BATCH_BYTES

    def put(self, ids: Sequence[int], columns: dict[str, Column], wanted: Iterable[int]) -> None:
        """Store the rows of the `wanted` ids; a field that a sample has already is left unchanged."""
        keep = set(wanted)
        if not keep:
            return
        # By table, not by sample: set operations over key views, since puts have thousands of rows.
        held = {
            names: table.keys() & keep
            for names, table in self._tables.items()
            if not columns.keys().isdisjoint(names) and not table.keys().isdisjoint(keep)
        }
        if columns and not held and len(keep) == len(ids):
            self._add(Batch(dict(columns), len(ids), dict(zip(ids, range(len(ids)), strict=True))))
            return
        # Columns that are new for the same samples stay one batch; a repeated put may bring only some of them.
        together: dict[frozenset[int], list[str]] = {}
        for name in columns:
            have = frozenset[int]().union(*(known for names, known in held.items() if name in names))
            together.setdefault(have, []).append(name)
        for have, names in together.items():
            missing = keep - have
            row_of = dict(zip(ids, range(len(ids)), strict=True))
            if len(missing) < len(ids):
                row_of = {i: row for i, row in row_of.items() if i in missing}
            if row_of:
                self._add(Batch({name: columns[name] for name in names}, len(ids), row_of))

    def read(self, ids: Sequence[int], fields: Sequence[str]) -> dict[str, Column]:
        """Return fields of the samples, rows in the order of `ids`.

        Raises:
            QueueError: `unknown_sample` if a sample is not here or lacks a field; `conflict` if rows differ in kind.
        """
        columns: dict[str, Column] = {}
        if not ids:
            return columns
        runs_of: dict[tuple[str, ...], list[Run]] = {}
        for name in fields:
            names = next((names for names in runs_of if name in names), None)
            if names is None:
                names, batches = self._batches(ids, name)
                runs_of[names] = _runs(ids, batches)
            columns[name] = _column(name, runs_of[names])
        return columns

    def fields(self, sample_id: int) -> dict[str, int]:
        """Return the fields of a sample and the bytes of each row."""
        out = {}
        for table in self._tables.values():
            if sample_id in table:
                batch = table[sample_id]
                for name, column in batch.columns.items():
                    start, stop = column.row_bounds(batch.row_of[sample_id])
                    out[name] = stop - start
        return out

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each sample's values."""
        total: dict[int, int] = {}
        for table in self._tables.values():
            for batch in {id(batch): batch for batch in table.values()}.values():
                sizes = batch.row_bytes()
                for sample_id, row in batch.row_of.items():
                    total[sample_id] = total.get(sample_id, 0) + sizes[row]
        return total

    def drop(self, ids: Iterable[int]) -> None:
        """Drop all fields of the samples."""
        ids = list(ids)
        for names in list(self._tables):
            self._remove(names, ids)

    def drop_fields(self, ids: Iterable[int], fields: Iterable[str]) -> None:
        """Drop some fields of the samples."""
        ids = list(ids)
        for name in set(fields):
            for names, table in list(self._tables.items()):
                if name in names and len(names) > 1:
                    self._split_off({id(table[i]): table[i] for i in ids if i in table}.values(), name)
            self._remove((name,), ids)

    def _add(self, batch: Batch) -> None:
        self.nbytes += batch.nbytes
        self._count(batch, 1)
        table = self._tables.setdefault(tuple(batch.columns), {})
        table.update(dict.fromkeys(batch.row_of, batch))
        self._compact(batch)

    def _split_off(self, batches: Iterable[Batch], name: str) -> None:
        """Move one column of each batch into a batch of its own, so that it can be dropped alone."""
        for batch in batches:
            rest = {other: column for other, column in batch.columns.items() if other != name}
            row_of = dict(batch.row_of)
            # Taken out and added as two: the table is found by the names of its batch's columns.
            self._remove(tuple(batch.columns), list(row_of))
            for columns in (rest, {name: batch.columns[name]}):
                self._add(Batch(columns, batch.rows, dict(row_of)))

    def _batches(self, ids: Sequence[int], name: str) -> tuple[tuple[str, ...], list[Batch]]:
        """Return the batch of each sample's row of a field, and the names of all fields that are there too."""
        tables = {names: table for names, table in self._tables.items() if name in names}
        for names, table in tables.items():
            # Nearly always one table has all of them, since rows that came together stay together.
            batches_of = list(map(table.get, ids))
            if None not in batches_of:
                return names, cast("list[Batch]", batches_of)
        batches = []
        for i in ids:
            batch = next((table[i] for table in tables.values() if i in table), None)
            if batch is None:
                raise QueueError("unknown_sample", f"sample {i} has no field {name!r} here")
            batches.append(batch)
        return (name,), batches

    def _remove(self, names: tuple[str, ...], ids: Sequence[int]) -> None:
        table = self._tables.get(names, {})
        touched = {}
        before, pop = len(table), table.pop
        for sample_id in ids:
            batch = pop(sample_id, None)
            if batch is not None:
                del batch.row_of[sample_id]
                touched[id(batch)] = batch
        self._entry_count -= before - len(table)
        for batch in touched.values():
            # A batch's buffers are freed with its last row; before that, compacting bounds what the others keep alive.
            if batch.row_of:
                self._compact(batch)
            else:
                self.nbytes -= batch.nbytes
                self._count(batch, -1)
        if not table:
            self._tables.pop(names, None)

    def _compact(self, batch: Batch) -> None:
        # Small batches are not worth a copy; others once a quarter of their rows is left, so copies stay amortised.
        if batch.nbytes < COMPACT_BYTES or len(batch.row_of) * COMPACT_RATIO > batch.rows:
            return
        # In the order of rows, so that the copy reads the old buffers once from front to back.
        ids = sorted(batch.row_of, key=batch.row_of.__getitem__)
        rows = [batch.row_of[i] for i in ids]
        columns = {name: gather_rows([(column, rows)]) for name, column in batch.columns.items()}
        fresh = Batch(columns, len(rows), {i: row for row, i in enumerate(ids)})
        self.nbytes -= batch.nbytes
        self._count(batch, -1)
        self._add(fresh)

    def _count(self, batch: Batch, sign: int) -> None:
        self._entry_count += sign * len(batch.row_of)
        self._column_count += sign * len(batch.columns)
        self._batch_count += sign


def _runs(ids: Sequence[int], batches: Sequence[Batch]) -> list[Run]:
    """Group the samples' rows by batch, in the order of `ids`."""
    # One comparison in C for the usual claim, whose rows came in one put.
    if batches.count(batches[0]) == len(batches):
        return [(batches[0], _rows(list(map(batches[0].row_of.__getitem__, ids))))]
    runs: list[tuple[Batch, list[int]]] = []
    last = None
    for i, batch in zip(ids, batches, strict=True):
        if batch is not last:
            runs.append((batch, []))
            last = batch
        runs[-1][1].append(batch.row_of[i])
    return [(batch, _rows(rows)) for batch, rows in runs]


def _rows(rows: list[int]) -> Sequence[int]:
    """Convert row numbers to a range where they are adjacent."""
    # A range is sent as a view of the buffer; a list of rows is gathered into a copy.
    between = range(rows[0], rows[-1] + 1)
    return between if list(between) == rows else rows


def _column(name: str, runs: Sequence[Run]) -> Column:
    if len(runs) == 1:
        batch, rows = runs[0]
        return select_rows(batch.columns[name], rows)
    return gather_rows([(batch.columns[name], rows) for batch, rows in runs])
