"""SlotTable that come through the queue itself: their columns live as long as their slot is full or being read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xtoken_core import schema
from xtoken_core.queue.run.rings import Rings, SlotState
from xtoken_core.queue.store import Store
from xtoken_core.wire import Column, QueueError

HELD = (SlotState.FULL, SlotState.READING)


@dataclass(frozen=True, slots=True)
class Held:
    """The columns of one filling of a slot."""

    ids: tuple[int, ...]
    names: tuple[str, ...]


class SignalColumns:
    """Which columns of a run's store belong to which filling of which slot.

    They are volatile: never journalled, and gone with the ring, the slot's release or a rewind. A signal that lies in
    memory which teacher and student share has none.
    """

    def __init__(self, rings: Rings, store: Store, teachers: int) -> None:
        self.rings, self.store = rings, store
        self._names = [
            frozenset(schema.field_name(field, index) for field in (schema.TEACHER_HIDDEN, schema.TEACHER_MAXIMA))
            for index in schema.teacher_indices(teachers)
        ]
        self._held: dict[tuple[int, int, int], Held] = {}

    def check(self, teacher: int, ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Refuse what is no signal of this teacher, or not one row per sample of the slot.

        Raises:
            QueueError: `bad_request`, with the column's name.
        """
        for name, column in columns.items():
            if name not in self._names[teacher]:
                raise QueueError("bad_request", f"{name!r} is no column of the signal of teacher {teacher}")
            if column.rows != len(ids):
                raise QueueError("bad_request", f"{name!r} has {column.rows} rows, the slot {len(ids)} samples")

    def keep(self, ring: int, slot: int, generation: int, ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """A slot was filled with these columns, a row for each of `ids`."""
        if columns:
            self.store.put(ids, dict(columns), ids)
            self._held[ring, slot, generation] = Held(tuple(ids), tuple(columns))

    def read(self, ring: int, slot: int, generation: int) -> dict[str, Column]:
        """The columns of a filling, if it came with any."""
        held = self._held.get((ring, slot, generation))
        return self.store.read(held.ids, held.names) if held else {}

    def settle(self) -> None:
        """Let the columns go whose slot holds another filling by now, or none."""
        standing = {
            (ring.id, index, slot.generation)
            for ring in self.rings.by_pair.values()
            for index, slot in enumerate(ring.slots)
            if slot.state in HELD
        }
        for key in [key for key in self._held if key not in standing]:
            held = self._held.pop(key)
            self.store.drop_fields(held.ids, held.names)
