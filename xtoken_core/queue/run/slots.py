"""Slot table: which slot of which ring holds which micro-batch's signal, and which trainer lease reads it.

A slot goes `FREE -> FILLING -> FULL -> READING -> FREE`. Its generation grows with every filling, so that a late or
repeated release of an older filling changes nothing. No clock frees a slot. A signal is volatile: it is valid only as
long as both sessions of its ring live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from xtoken_core import schema
from xtoken_core.queue.run.names import signal_fields, teacher_task
from xtoken_core.queue.sample import Lease, Status
from xtoken_core.queue.samples import Samples
from xtoken_core.wire import QueueError
from xtoken_core.wire.messages import SlotRef


class SlotState(IntEnum):
    """State of a slot."""

    FREE = 0
    FILLING = 1
    FULL = 2
    READING = 3


READABLE = (SlotState.FULL, SlotState.READING)


@dataclass(slots=True)
class Slot:
    """One slot: its state, the micro-batch it holds, and the teacher's lease that fills it."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    lease: int = -1
    ids: tuple[int, ...] = ()

    def free(self) -> None:
        """Empty the slot; the generation stays."""
        self.state, self.lease, self.ids = SlotState.FREE, -1, ()


@dataclass(slots=True)
class RegisteredRing:
    """Slots that one teacher session shares with one trainer session."""

    id: int
    teacher: int
    rank: int
    teacher_session: str
    trainer_session: str
    handle: bytes
    slots: list[Slot]
    opened: bool = False

    def free_slot(self) -> int | None:
        """Return the lowest free slot."""
        return next((i for i, slot in enumerate(self.slots) if slot.state == SlotState.FREE), None)

    def fill(self, index: int, lease: int, ids: tuple[int, ...]) -> Slot:
        """Start filling a slot."""
        slot = self.slots[index]
        slot.state, slot.lease, slot.ids = SlotState.FILLING, lease, ids
        # Never reused, also not after a rewind: a late release of the old filling names another number.
        slot.generation += 1
        return slot


class Rings:
    """Rings of a run: at most one per teacher and rank."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.by_pair: dict[tuple[int, int], RegisteredRing] = {}
        self._announced = 0

    def announce(
        self, teacher: int, rank: int, teacher_session: str, trainer_session: str, handle: bytes
    ) -> RegisteredRing:
        """Add a ring for a pair, whose old ring the caller has closed."""
        self._announced += 1
        slots = [Slot() for _ in range(self.slots)]
        ring = RegisteredRing(self._announced, teacher, rank, teacher_session, trainer_session, handle, slots)
        self.by_pair[teacher, rank] = ring
        return ring

    def get(self, ring_id: int) -> RegisteredRing:
        """Return a ring.

        Raises:
            QueueError: `ring_closed` if it is gone.
        """
        for ring in self.by_pair.values():
            if ring.id == ring_id:
                return ring
        raise QueueError("ring_closed", f"ring {ring_id} is closed: one of its two sessions has ended")

    def of_session(self, session: str) -> list[RegisteredRing]:
        """Return the rings of which the session is one side."""
        return [r for r in self.by_pair.values() if session in (r.teacher_session, r.trainer_session)]

    def drop(self, ring: RegisteredRing) -> None:
        """Remove a ring."""
        self.by_pair.pop((ring.teacher, ring.rank), None)


@dataclass(frozen=True, slots=True)
class Filling:
    """A slot that a teacher has leased, and the living samples of its micro-batch."""

    lease: int
    ids: tuple[int, ...]
    slot: int
    generation: int


@dataclass(slots=True)
class Reading:
    """A trainer's lease.

    Attributes:
        session: The trainer.
        ids: Its samples.
        pending: Ring and index of the slots that are not released yet.
        withdrawn: A signal went before its release, or was refused: the step must be repeated.
    """

    session: str
    ids: tuple[int, ...]
    pending: set[tuple[int, int]] = field(default_factory=set)
    withdrawn: bool = False


class SlotTable:
    """Rings, their slots and readers.

    Attributes:
        fields: Field of every teacher's signal.
        routes: By sample the bits of the teachers that compare it (`schema.TEACHERS`); without an entry all do.
        readings: Trainer leases since the last rewind whose window is not acknowledged, by lease id.
    """

    def __init__(self, samples: Samples, teachers: int, slots: int) -> None:
        self.samples = samples
        self.fields = signal_fields(teachers)
        self.rings = Rings(slots)
        self.readings: dict[int, Reading] = {}
        self.routes: dict[int, int] = {}

    # Routes

    def route(self, routes: Mapping[int, int]) -> None:
        """Mark samples as done for the teachers that do not compare them, whose signals no trainer waits for."""
        self.routes.update(routes)
        for sample_id, bits in routes.items():
            sample = self.samples.samples.get(sample_id)
            others = set(range(len(self.fields))).difference(schema.teachers_of(bits, len(self.fields)))
            if sample is not None and sample_id not in self.samples.dead:
                for teacher in others:
                    self.samples.mark(sample, teacher_task(teacher), Status.DONE)
                self.samples.produce([sample_id], {self.fields[teacher] for teacher in others})

    def _teachers_of(self, ids: Iterable[int]) -> set[int]:
        """Return the teachers that compare some sample of a micro-batch."""
        count = len(self.fields)
        return {teacher for i in ids for teacher in schema.teachers_of(self.routes.get(i, -1), count)}

    # Teachers

    def fill(
        self, session: str, ring: RegisteredRing, ids: Sequence[int], fields: Iterable[str] = ()
    ) -> Filling | Status | None:
        """Lease a micro-batch with a free slot.

        Returns:
            The same filling again while it is under way; `Status.DONE` after it; None while there is no free slot, the
            ring is not opened, or a sample is not ready.
        """
        held, dead = self.samples.samples, self.samples.dead
        # The slot remembers the micro-batch as it was planned; what has died since is in neither lease nor reply.
        alive = tuple(i for i in ids if i not in dead)
        for index, slot in enumerate(ring.slots):
            if slot.state == SlotState.FILLING and slot.ids == tuple(ids):
                return Filling(slot.lease, alive, index, slot.generation)
        task = teacher_task(ring.teacher)
        # Also where all have died: nothing is left to compute, and no slot is taken for it.
        if all(i in held and held[i].status[task] == Status.DONE for i in alive):
            return Status.DONE
        free = ring.free_slot()
        if not ring.opened or free is None:
            return None
        lease = self.samples.claim_ids(session, task, ids, fields)
        if lease is None:
            return None
        slot = ring.fill(free, lease.id, tuple(ids))
        return Filling(lease.id, lease.ids, free, slot.generation)

    def mark_full(self, session: str, lease: Lease) -> None:
        """Mark the slot of a lease as full and the teacher's task as done."""
        ring, _, slot = self.slot_of(session, lease.id)
        slot.state = SlotState.FULL
        self._free_if_dead(slot)
        ids = lease.ids
        self.samples.finish(lease.task, ids)
        self.samples.produce(ids, {self.fields[ring.teacher]})

    def slot_of(self, session: str, lease_id: int) -> tuple[RegisteredRing, int, Slot]:
        """Return ring, index and slot that a teacher's lease fills.

        Raises:
            QueueError: `lease_revoked` if there is none any more.
        """
        for ring in self.rings.of_session(session):
            for index, slot in enumerate(ring.slots):
                if slot.lease == lease_id and slot.state == SlotState.FILLING:
                    return ring, index, slot
        raise QueueError("lease_revoked", f"lease {lease_id} has no slot any more")

    def refuse(self, session: str, lease_id: int) -> None:
        """Free the slot of a refused teacher's lease; a refused trainer's lease makes its step be repeated."""
        for ring in self.rings.of_session(session):
            for slot in ring.slots:
                if slot.lease == lease_id:
                    slot.free()
        if lease_id in self.readings:
            self.readings[lease_id].withdrawn = True

    def undo_claim(self, lease_id: int) -> None:
        """Undo a claim that is refused after all: its slot is free again, or full and not being read."""
        reading = self.readings.pop(lease_id, None)
        for ring, index, slot in self._slots():
            if slot.lease == lease_id and slot.state == SlotState.FILLING:
                slot.free()
            elif reading is not None and (ring.id, index) in reading.pending:
                slot.state = SlotState.FULL
        self.samples.undo_claim(lease_id)

    # Trainers

    def read(self, lease: Lease, rank: int, ids: Sequence[int]) -> list[SlotRef]:
        """Return the slot of every teacher's signal for a trainer's lease.

        Raises:
            QueueError: `conflict` if no slot holds this micro-batch, although no signal was withdrawn.
        """
        if not lease.ids:
            return []
        full = [
            (ring, index, slot)
            for ring, index, slot in self._slots()
            if ring.rank == rank and slot.state in READABLE and slot.ids == tuple(ids)
        ]
        # A missing slot is expected after a withdrawal only. Otherwise the two have planned differently, which no retry
        # mends.
        if len(full) < len(self._teachers_of(lease.ids)) and not self.withdrawn(lease.session):
            # A repeated claim must not lose the lease that the first one still holds.
            if lease.id not in self.readings:
                self.samples.undo_claim(lease.id)
            why = "trainer and teacher have planned the window differently"
            raise QueueError("conflict", f"no slot holds the micro-batch of samples {list(ids)[:8]}: {why}")
        reading = self.readings.setdefault(lease.id, Reading(lease.session, lease.ids))
        for ring, index, slot in full:
            slot.state = SlotState.READING
            reading.pending.add((ring.id, index))
        return [
            SlotRef(teacher=ring.teacher, ring=ring.id, slot=index, generation=slot.generation)
            for ring, index, slot in full
        ]

    def release(self, ring: RegisteredRing, index: int, generation: int) -> None:
        """Free a slot that was read; an older filling is ignored.

        Raises:
            QueueError: `bad_request` if the ring has no such slot.
        """
        if index >= len(ring.slots):
            raise QueueError("bad_request", f"ring {ring.id} has {len(ring.slots)} slots, none is number {index}")
        slot = ring.slots[index]
        # Repeated or late releases change nothing, so that a trainer may send them again after any doubt.
        if not self.is_current(slot, generation) or slot.state != SlotState.READING:
            return
        for reading in self.readings.values():
            reading.pending.discard((ring.id, index))
        slot.free()

    @staticmethod
    def is_current(slot: Slot, generation: int) -> bool:
        """Return whether a generation is the slot's present one."""
        return slot.generation == generation

    def withdrawn(self, session: str) -> bool:
        """Return whether a signal went before this trainer had released it, or was refused by it."""
        return any(reading.withdrawn for reading in self.readings.values() if reading.session == session)

    # Ended sessions, dead and dropped samples, rewinds

    def session_ended(self, session: str) -> None:
        """Close the session's rings and drop its readings."""
        for ring in self.rings.of_session(session):
            self.close(ring)
        self.readings = {lease: reading for lease, reading in self.readings.items() if reading.session != session}

    def close(self, ring: RegisteredRing) -> None:
        """Close a ring and withdraw every signal in it."""
        for index, slot in enumerate(ring.slots):
            if slot.state == SlotState.FILLING:
                self.samples.give_back(slot.lease)
            elif slot.state == SlotState.FULL:
                self._withdraw(ring, slot)
            elif slot.state == SlotState.READING:
                # The memory may be gone while the trainer reads it: its step cannot be trusted.
                self._mark_withdrawn(ring, index)
            slot.free()
        self.rings.drop(ring)

    def drop(self, positions: Iterable[int]) -> None:
        """Drop the readings and routes of dropped samples."""
        gone = set(positions)
        for position in gone.intersection(self.routes):
            del self.routes[position]
        self.readings = {lease: reading for lease, reading in self.readings.items() if gone.isdisjoint(reading.ids)}

    def free_dead(self) -> None:
        """Free full slots whose samples have all died: no trainer will ask for them."""
        for _, _, slot in self._slots():
            self._free_if_dead(slot)

    def clear(self) -> None:
        """Free every slot and withdraw every signal for a rewind; rings stay open."""
        for _, _, slot in self._slots():
            slot.free()
        for sample_id in self.samples.samples:
            for name in self.fields:
                self.samples.withdraw(sample_id, name)
        self.readings.clear()

    def _slots(self) -> Iterator[tuple[RegisteredRing, int, Slot]]:
        for ring in self.rings.by_pair.values():
            for index, slot in enumerate(ring.slots):
                yield ring, index, slot

    def _free_if_dead(self, slot: Slot) -> None:
        if slot.state == SlotState.FULL and all(i in self.samples.dead for i in slot.ids):
            slot.free()

    def _withdraw(self, ring: RegisteredRing, slot: Slot) -> None:
        """Withdraw a signal that is not being read: the teacher's task is ready again, training waits."""
        task = teacher_task(ring.teacher)
        for sample_id in slot.ids:
            sample = self.samples.samples.get(sample_id)
            # `withdraw` makes what waits ready again, for the teacher's next session to compute.
            if sample is not None and sample_id not in self.samples.dead:
                self.samples.mark(sample, task, Status.WAITING)
                self.samples.withdraw(sample_id, self.fields[ring.teacher])

    def _mark_withdrawn(self, ring: RegisteredRing, index: int) -> None:
        for reading in self.readings.values():
            if (ring.id, index) in reading.pending:
                reading.withdrawn = True
