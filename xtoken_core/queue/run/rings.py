"""The slot table: a teacher fills a slot, its student reads and releases it. No clock frees a slot.

`FREE -> FILLING -> FULL -> READING -> FREE`. A slot's generation grows with every filling, so that a late or repeated
release of an older filling touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from xtoken_core.wire import QueueError


class SlotState(IntEnum):
    """What happens in a slot."""

    FREE = 0
    FILLING = 1
    FULL = 2
    READING = 3


@dataclass(slots=True)
class Slot:
    """One slot: the micro-batch it holds and who works on it."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    lease: int = -1
    ids: tuple[int, ...] = ()

    def free(self) -> None:
        """Nothing in it counts any more."""
        self.state, self.lease, self.ids = SlotState.FREE, -1, ()


@dataclass(slots=True)
class Ring:
    """The slots that one teacher session shares with one trainer session."""

    id: int
    teacher: int
    rank: int
    teacher_session: str
    trainer_session: str
    handle: bytes
    slots: list[Slot]
    opened: bool = False

    def free_slot(self) -> int | None:
        """The lowest free slot."""
        return next((i for i, slot in enumerate(self.slots) if slot.state == SlotState.FREE), None)

    def fill(self, index: int, lease: int, ids: tuple[int, ...]) -> Slot:
        """Start filling a slot."""
        slot = self.slots[index]
        slot.state, slot.lease, slot.ids = SlotState.FILLING, lease, ids
        slot.generation += 1
        return slot

    def release(self, index: int, generation: int) -> Slot | None:
        """Free a slot that was read, if this is the filling that is meant; None for an older one.

        Raises:
            QueueError: `bad_request` if the ring has no such slot.
        """
        if index >= len(self.slots):
            raise QueueError("bad_request", f"ring {self.id} has {len(self.slots)} slots, none is number {index}")
        slot = self.slots[index]
        return slot if self.current(slot, generation) and slot.state == SlotState.READING else None

    @staticmethod
    def current(slot: Slot, generation: int) -> bool:
        """Whether a message about a filling is about the one that the slot holds now."""
        return slot.generation == generation


class Rings:
    """The rings of a run: at most one per teacher and rank."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.by_pair: dict[tuple[int, int], Ring] = {}
        self._announced = 0

    def announce(self, teacher: int, rank: int, teacher_session: str, trainer_session: str, handle: bytes) -> Ring:
        """A new ring for a pair; the caller has closed the pair's old one."""
        self._announced += 1
        slots = [Slot() for _ in range(self.slots)]
        ring = Ring(self._announced, teacher, rank, teacher_session, trainer_session, handle, slots)
        self.by_pair[teacher, rank] = ring
        return ring

    def get(self, ring_id: int) -> Ring:
        """The ring.

        Raises:
            QueueError: `ring_closed` if it is gone.
        """
        for ring in self.by_pair.values():
            if ring.id == ring_id:
                return ring
        raise QueueError("ring_closed", f"ring {ring_id} is closed: one of its two sessions has ended")

    def of_session(self, session: str) -> list[Ring]:
        """Rings in which the session is one of the two."""
        return [r for r in self.by_pair.values() if session in (r.teacher_session, r.trainer_session)]

    def drop(self, ring: Ring) -> None:
        """Forget a ring."""
        self.by_pair.pop((ring.teacher, ring.rank), None)
