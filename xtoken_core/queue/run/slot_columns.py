"""Columns of signals that travel through the queue, kept as long as their slot is full or being read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xtoken_core import schema
from xtoken_core.queue.run.slots import READABLE, Rings
from xtoken_core.queue.store import Store
from xtoken_core.wire import Column, QueueError

SIGNAL_FIELDS = (schema.TEACHER_HIDDEN, schema.TEACHER_MAXIMA, schema.TEACHER_TOPK, schema.TEACHER_REQUESTS)


@dataclass(frozen=True, slots=True)
class _SlotRows:
    """Columns of one filling of a slot."""

    ids: tuple[int, ...]
    names: tuple[str, ...]


class SlotColumns:
    """Columns of a run's store by ring, slot and generation.

    They are volatile: never journalled, and dropped with the ring, the slot's release or a rewind. A signal in memory
    that teacher and student share has none but the requests of a teacher on a server.
    """

    def __init__(self, rings: Rings, store: Store, teachers: int) -> None:
        self.rings, self.store = rings, store
        self._names = [
            frozenset(schema.field_name(field, index) for field in SIGNAL_FIELDS) for index in range(teachers)
        ]
        self._rows: dict[tuple[int, int, int], _SlotRows] = {}

    def check(self, teacher: int, ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Check that columns belong to this teacher's signal and have a row per sample of the slot.

        Raises:
            QueueError: `bad_request`, with the column's name.
        """
        for name, column in columns.items():
            if name not in self._names[teacher]:
                raise QueueError("bad_request", f"{name!r} is no column of the signal of teacher {teacher}")
            if column.rows != len(ids):
                raise QueueError("bad_request", f"{name!r} has {column.rows} rows, the slot {len(ids)} samples")

    def put(self, ring: int, slot: int, generation: int, ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Store the columns of a filling, a row for each of `ids`."""
        if columns:
            self.store.put(ids, dict(columns), ids)
            self._rows[ring, slot, generation] = _SlotRows(tuple(ids), tuple(columns))

    def read(self, ring: int, slot: int, generation: int) -> dict[str, Column]:
        """Return the columns of a filling; empty for a signal in shared memory."""
        rows = self._rows.get((ring, slot, generation))
        return self.store.read(rows.ids, rows.names) if rows else {}

    def drop_stale(self) -> None:
        """Drop the columns whose slot has been freed or filled again."""
        # By generation: a slot that was released and filled again holds other columns under the same index.
        current = {
            (ring.id, index, slot.generation)
            for ring in self.rings.by_pair.values()
            for index, slot in enumerate(ring.slots)
            if slot.state in READABLE
        }
        for key in [key for key in self._rows if key not in current]:
            rows = self._rows.pop(key)
            self.store.drop_fields(rows.ids, rows.names)
