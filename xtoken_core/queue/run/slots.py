"""The teachers' signals of a run: which slot holds which micro-batch, who reads it, and when it must be forgotten.

A signal is volatile: it is good only as long as both sessions of its ring live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from xtoken_core import schema
from xtoken_core.queue.run.rings import Ring, Rings, Slot, SlotState
from xtoken_core.queue.tasks.samples import Lease, Samples, Status
from xtoken_core.wire import QueueError


def teacher_task(teacher: int) -> str:
    """The name of a teacher's task."""
    return f"teacher_{teacher}"


def signal_fields(teachers: int) -> tuple[str, ...]:
    """The volatile fields that stand for the teachers' signals."""
    return tuple(schema.field_name(schema.TEACHER_LOGITS, i) for i in schema.teacher_indices(teachers))


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Where a signal lies: what a trainer's claim tells it for every teacher."""

    ring: int
    slot: int
    generation: int
    rows: dict[int, int]


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """A teacher's micro-batch, samples that have died left out, and the slot to fill."""

    lease: int
    ids: tuple[int, ...]
    slot: int
    generation: int


@dataclass(slots=True)
class Reading:
    """A trainer's lease.

    Attributes:
        ids: Its samples.
        pending: Ring and index of the slots it still reads.
        withdrawn: Whether a gradient of it cannot be trusted or is missing: the step must be done again.
    """

    session: str
    ids: tuple[int, ...]
    pending: set[tuple[int, int]] = field(default_factory=set)
    withdrawn: bool = False


class SlotTable:
    """Rings, their slots and readers.

    Attributes:
        fields: The field of every teacher's signal.
        readings: The trainers' leases since the last rewind whose window is not acknowledged, by lease id.
    """

    def __init__(self, samples: Samples, teachers: int, slots: int) -> None:
        self.samples = samples
        self.fields = signal_fields(teachers)
        self.rings = Rings(slots)
        self.readings: dict[int, Reading] = {}

    # Teachers

    def fill(
        self, session: str, ring: Ring, ids: Sequence[int], fields: Iterable[str] = ()
    ) -> SlotClaim | Status | None:
        """Lease a micro-batch with a free slot; the same again while it is being filled; `Status.DONE` if it was."""
        held, dead = self.samples.samples, self.samples.dead
        alive = tuple(i for i in ids if i not in dead)
        for index, slot in enumerate(ring.slots):
            if slot.state == SlotState.FILLING and slot.ids == tuple(ids):
                return SlotClaim(slot.lease, alive, index, slot.generation)
        task = teacher_task(ring.teacher)
        if all(i in held and held[i].status[task] == Status.DONE for i in alive):
            return Status.DONE
        free = ring.free_slot()
        if not ring.opened or free is None:
            return None
        lease = self.samples.claim_ids(session, task, ids, fields)
        if lease is None:
            return None
        slot = ring.fill(free, lease.id, tuple(ids))
        return SlotClaim(lease.id, lease.ids, free, slot.generation)

    def publish(self, session: str, lease: Lease) -> None:
        """The lease's slot is full: its signal is there, its task done."""
        ring, _, slot = self.slot_of(session, lease.id)
        slot.state = SlotState.FULL
        self._free_if_dead(slot)
        ids = lease.ids
        self.samples.finish(lease.task, ids)
        self.samples.produce(ids, {self.fields[ring.teacher]})

    def slot_of(self, session: str, lease_id: int) -> tuple[Ring, int, Slot]:
        """The ring, index and slot that a teacher's lease fills.

        Raises:
            QueueError: `lease_revoked` if there is none any more.
        """
        for ring in self.rings.of_session(session):
            for index, slot in enumerate(ring.slots):
                if slot.lease == lease_id and slot.state == SlotState.FILLING:
                    return ring, index, slot
        raise QueueError("lease_revoked", f"lease {lease_id} has no slot any more")

    def refused(self, session: str, lease_id: int) -> None:
        """A nack: a teacher's slot is free again; what a trainer's lease has missed makes its step be done again."""
        for ring in self.rings.of_session(session):
            for slot in ring.slots:
                if slot.lease == lease_id:
                    slot.free()
        if lease_id in self.readings:
            self.readings[lease_id].withdrawn = True

    # Trainers

    def read(self, lease: Lease, rank: int, ids: Sequence[int]) -> list[SlotRef]:
        """The places of every teacher's signal of a trainer's lease.

        Raises:
            QueueError: `conflict` if there is no such micro-batch in a slot, although none was withdrawn.
        """
        if not lease.ids:
            return []
        full = (SlotState.FULL, SlotState.READING)
        places = [p for p in self._slots() if p[0].rank == rank and p[2].state in full and p[2].ids == tuple(ids)]
        if len(places) < len(self.fields) and not self.withdrawn(lease.session):
            if lease.id not in self.readings:
                self.samples.undo(lease.id)
            why = "trainer and teacher have planned the window differently"
            raise QueueError("conflict", f"no slot holds the micro-batch of samples {list(ids)[:8]}: {why}")
        reading = self.readings.setdefault(lease.id, Reading(lease.session, lease.ids))
        for ring, index, slot in places:
            slot.state = SlotState.READING
            reading.pending.add((ring.id, index))
        rows = {i: row for row, i in enumerate(ids)}
        return [SlotRef(ring.id, index, slot.generation, rows) for ring, index, slot in places]

    def release(self, ring: Ring, index: int, generation: int) -> bool:
        """A slot was read; False for a filling that is gone already."""
        slot = ring.release(index, generation)
        if slot is None:
            return False
        for reading in self.readings.values():
            reading.pending.discard((ring.id, index))
        slot.free()
        return True

    def withdrawn(self, session: str) -> bool:
        """Whether a signal was withdrawn before this trainer had released it, or refused by it."""
        return any(reading.withdrawn for reading in self.readings.values() if reading.session == session)

    # When sessions end, samples die or go, the run is rewound

    def session_ended(self, session: str) -> None:
        """Close its rings and forget what it has read."""
        for ring in self.rings.of_session(session):
            self.close(ring)
        self.readings = {lease: reading for lease, reading in self.readings.items() if reading.session != session}

    def close(self, ring: Ring) -> None:
        """End a ring: nothing in its slots can be trusted any more."""
        for index, slot in enumerate(ring.slots):
            if slot.state == SlotState.FILLING:
                self.samples.give_back(slot.lease)
            elif slot.state == SlotState.FULL:
                self._withdraw(ring, slot)
            elif slot.state == SlotState.READING:
                self._mark_withdrawn(ring, index)
            slot.free()
        self.rings.drop(ring)

    def let_go(self, positions: Iterable[int]) -> None:
        """The samples are dropped: so is what was noted of their reading."""
        gone = set(positions)
        self.readings = {lease: reading for lease, reading in self.readings.items() if gone.isdisjoint(reading.ids)}

    def free_dead(self) -> None:
        """No trainer will ask for full slots whose samples have all died."""
        for _, _, slot in self._slots():
            self._free_if_dead(slot)

    def empty(self) -> None:
        """A rewind: every slot is free and no signal is there; rings stay."""
        for _, _, slot in self._slots():
            slot.free()
        for sample_id in self.samples.samples:
            for name in self.fields:
                self.samples.withdraw(sample_id, name)
        self.readings.clear()

    def _slots(self) -> Iterator[tuple[Ring, int, Slot]]:
        for ring in self.rings.by_pair.values():
            for index, slot in enumerate(ring.slots):
                yield ring, index, slot

    def _free_if_dead(self, slot: Slot) -> None:
        if slot.state == SlotState.FULL and all(i in self.samples.dead for i in slot.ids):
            slot.free()

    def _withdraw(self, ring: Ring, slot: Slot) -> None:
        """A signal nobody has begun to read is gone: the teacher's task is ready again, training waits."""
        task = teacher_task(ring.teacher)
        for sample_id in slot.ids:
            sample = self.samples.samples.get(sample_id)
            if sample is not None and sample_id not in self.samples.dead:
                sample.mark(task, Status.WAITING)
                self.samples.withdraw(sample_id, self.fields[ring.teacher])

    def _mark_withdrawn(self, ring: Ring, index: int) -> None:
        for reading in self.readings.values():
            if (ring.id, index) in reading.pending:
                reading.withdrawn = True
