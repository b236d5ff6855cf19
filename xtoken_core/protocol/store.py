"""Where the columns of samples lie: whole buffers as they came, rows pointing into them.

Nothing is copied when a batch arrives or is split. A buffer lives as long as one of its rows does; one that is mostly
dead is compacted, so that a single slow sample does not hold a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from xtoken_core.wire import Column, QueueError, concat_columns, select_rows

COMPACT_BYTES = 1 << 16
COMPACT_SHARE = 4


class Chunk:
    """One column as it came, and which of its rows still belong to a sample."""

    __slots__ = ("column", "name", "owners")

    def __init__(self, name: str, column: Column, owners: dict[int, int]) -> None:
        self.name = name
        self.column = column
        self.owners = owners


class Store:
    """Columns of the samples of one partition.

    Attributes:
        nbytes: Bytes of all buffers held.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._rows: dict[int, dict[str, tuple[Chunk, int]]] = {}

    def put(self, ids: Sequence[int], columns: dict[str, Column], wanted: Iterable[int]) -> None:
        """Keep the rows of the `wanted` ids; a field that a sample has already stays as it was."""
        keep = set(wanted)
        for name, column in columns.items():
            owners = {row: i for row, i in enumerate(ids) if i in keep and name not in self._rows.get(i, ())}
            if not owners:
                continue
            chunk = Chunk(name, column, owners)
            self.nbytes += column.nbytes
            for row, sample_id in owners.items():
                self._rows.setdefault(sample_id, {})[name] = (chunk, row)
            self._compact(chunk)

    def read(self, ids: Sequence[int], fields: Sequence[str]) -> dict[str, Column]:
        """The fields of the samples, rows in the order of `ids`.

        Raises:
            QueueError: `unknown_sample` if a sample is not here or lacks a field; `conflict` if rows differ in kind.
        """
        columns: dict[str, Column] = {}
        if not ids:
            return columns
        for name in fields:
            places = [self._place(i, name) for i in ids]
            parts = [
                select_rows(chunk.column, [row for _, row in run])
                for chunk, run in groupby(places, key=lambda place: place[0])
            ]
            columns[name] = concat_columns(parts)
        return columns

    def fields(self, sample_id: int) -> dict[str, int]:
        """The fields that are held of a sample, and how many bytes each row has."""
        out = {}
        for name, (chunk, row) in self._rows.get(sample_id, {}).items():
            start, stop = chunk.column.row_bounds(row)
            out[name] = stop - start
        return out

    def drop(self, ids: Iterable[int]) -> None:
        """Let all fields of the samples go."""
        touched = []
        for sample_id in ids:
            touched += self._forget(self._rows.pop(sample_id, {}).values())
        self._settle(touched)

    def drop_fields(self, ids: Iterable[int], fields: Iterable[str]) -> None:
        """Let some fields of the samples go."""
        names, touched = set(fields), []
        for sample_id in ids:
            row = self._rows.get(sample_id, {})
            touched += self._forget([row.pop(name) for name in names.intersection(row)])
        self._settle(touched)

    def _place(self, sample_id: int, name: str) -> tuple[Chunk, int]:
        try:
            return self._rows[sample_id][name]
        except KeyError:
            raise QueueError("unknown_sample", f"sample {sample_id} has no field {name!r} here") from None

    def _forget(self, places: Iterable[tuple[Chunk, int]]) -> list[Chunk]:
        touched = []
        for chunk, row in places:
            del chunk.owners[row]
            touched.append(chunk)
        return touched

    def _settle(self, touched: list[Chunk]) -> None:
        for chunk in {id(c): c for c in touched}.values():
            if chunk.owners:
                self._compact(chunk)
            else:
                self.nbytes -= chunk.column.nbytes

    def _compact(self, chunk: Chunk) -> None:
        column = chunk.column
        if column.nbytes < COMPACT_BYTES or len(chunk.owners) * COMPACT_SHARE > column.rows:
            return
        rows = sorted(chunk.owners)
        part = select_rows(column, rows)
        kept = Column(part.kind, part.dtype, part.rows, part.item_shape, memoryview(bytes(part.values)), part.offsets)
        fresh = Chunk(chunk.name, kept, {new: chunk.owners[old] for new, old in enumerate(rows)})
        for row, sample_id in fresh.owners.items():
            self._rows[sample_id][chunk.name] = (fresh, row)
        self.nbytes += kept.nbytes - column.nbytes
