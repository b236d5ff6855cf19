"""Where the columns of samples lie: whole buffers as they came, rows pointing into them.

Nothing is copied when a batch arrives or is split. A batch lives as long as one of its rows does; one that is mostly
dead is compacted, so that a single slow sample does not hold all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xtoken_core.wire import Column, QueueError, gather_rows, select_rows

COMPACT_BYTES = 1 << 16
COMPACT_SHARE = 4


class Batch:
    """Columns that came together, and which of their rows still belong to a sample."""

    __slots__ = ("columns", "nbytes", "owners", "rows")

    def __init__(self, columns: dict[str, Column], rows: int, owners: dict[int, int]) -> None:
        self.columns = columns
        self.rows = rows
        self.owners = owners
        self.nbytes = sum(column.nbytes for column in columns.values())


Place = tuple[Batch, int]
Table = dict[int, Place]
Run = tuple[Batch, list[int]]


class Store:
    """Columns of the samples of one partition.

    Samples whose fields came together share a table: by id, their batch and their row in it.

    Attributes:
        nbytes: Bytes of all buffers held.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._tables: dict[tuple[str, ...], Table] = {}

    def put(self, ids: Sequence[int], columns: dict[str, Column], wanted: Iterable[int]) -> None:
        """Keep the rows of the `wanted` ids; a field that a sample has already stays as it was."""
        keep = set(wanted)
        held = {
            names: {i for i in keep if i in table}
            for names, table in self._tables.items()
            if not columns.keys().isdisjoint(names)
        }
        together: dict[frozenset[int], list[str]] = {}
        for name in columns:
            have = frozenset[int]().union(*(known for names, known in held.items() if name in names))
            together.setdefault(have, []).append(name)
        for have, names in together.items():
            owners = {row: i for row, i in enumerate(ids) if i in keep and i not in have}
            if owners:
                self._add(Batch({name: columns[name] for name in names}, len(ids), owners))

    def read(self, ids: Sequence[int], fields: Sequence[str]) -> dict[str, Column]:
        """The fields of the samples, rows in the order of `ids`.

        Raises:
            QueueError: `unknown_sample` if a sample is not here or lacks a field; `conflict` if rows differ in kind.
        """
        columns: dict[str, Column] = {}
        if not ids:
            return columns
        found: dict[tuple[str, ...], list[Run]] = {}
        for name in fields:
            names = next((names for names in found if name in names), None)
            if names is None:
                names, places = self._places(ids, name)
                found[names] = _runs(places)
            columns[name] = _column(name, found[names])
        return columns

    def fields(self, sample_id: int) -> dict[str, int]:
        """The fields that are held of a sample, and how many bytes each row has."""
        out = {}
        for table in self._tables.values():
            if sample_id in table:
                batch, row = table[sample_id]
                for name, column in batch.columns.items():
                    start, stop = column.row_bounds(row)
                    out[name] = stop - start
        return out

    def drop(self, ids: Iterable[int]) -> None:
        """Let all fields of the samples go."""
        ids = list(ids)
        for names in list(self._tables):
            self._forget(names, ids)

    def drop_fields(self, ids: Iterable[int], fields: Iterable[str]) -> None:
        """Let some fields of the samples go."""
        ids = list(ids)
        for name in set(fields):
            for names, table in list(self._tables.items()):
                if name in names and len(names) > 1:
                    self._set_apart({id(table[i][0]): table[i][0] for i in ids if i in table}.values(), name)
            self._forget((name,), ids)

    def _add(self, batch: Batch) -> None:
        self.nbytes += batch.nbytes
        table = self._tables.setdefault(tuple(batch.columns), {})
        table.update((i, (batch, row)) for row, i in batch.owners.items())
        self._compact(batch)

    def _set_apart(self, batches: Iterable[Batch], name: str) -> None:
        """Give one column of each batch a batch of its own, so that samples can lose it alone."""
        for batch in batches:
            rest = {other: column for other, column in batch.columns.items() if other != name}
            owners = dict(batch.owners)
            self._forget(tuple(batch.columns), list(owners.values()))
            for columns in (rest, {name: batch.columns[name]}):
                self._add(Batch(columns, batch.rows, dict(owners)))

    def _places(self, ids: Sequence[int], name: str) -> tuple[tuple[str, ...], list[Place]]:
        """Where a field's rows are, and the names of all fields that are there too."""
        tables = {names: table for names, table in self._tables.items() if name in names}
        for names, table in tables.items():
            if all(map(table.__contains__, ids)):
                return names, [table[i] for i in ids]
        places = []
        for i in ids:
            place = next((table[i] for table in tables.values() if i in table), None)
            if place is None:
                raise QueueError("unknown_sample", f"sample {i} has no field {name!r} here")
            places.append(place)
        return (name,), places

    def _forget(self, names: tuple[str, ...], ids: Sequence[int]) -> None:
        table = self._tables.get(names, {})
        touched = {}
        for sample_id in ids:
            place = table.pop(sample_id, None)
            if place is not None:
                batch, row = place
                del batch.owners[row]
                touched[id(batch)] = batch
        for batch in touched.values():
            if batch.owners:
                self._compact(batch)
            else:
                self.nbytes -= batch.nbytes
        if not table:
            self._tables.pop(names, None)

    def _compact(self, batch: Batch) -> None:
        if batch.nbytes < COMPACT_BYTES or len(batch.owners) * COMPACT_SHARE > batch.rows:
            return
        rows = sorted(batch.owners)
        columns = {name: gather_rows([(column, rows)]) for name, column in batch.columns.items()}
        fresh = Batch(columns, len(rows), {new: batch.owners[old] for new, old in enumerate(rows)})
        self.nbytes -= batch.nbytes
        self._add(fresh)


def _runs(places: Sequence[Place]) -> list[Run]:
    """The places as rows of one batch after the other."""
    runs: list[Run] = []
    last = None
    for batch, row in places:
        if batch is not last:
            runs.append((batch, []))
            last = batch
        runs[-1][1].append(row)
    return runs


def _column(name: str, runs: Sequence[Run]) -> Column:
    if len(runs) == 1:
        batch, rows = runs[0]
        return select_rows(batch.columns[name], rows)
    return gather_rows([(batch.columns[name], rows) for batch, rows in runs])
