"""The protocol of a run: positions, blocks, signals and steps, granted in plan order.

Pure transitions without clock, socket or tensor; `tests/unit/queue/test_model.py` explores them state by state.
A method that returns None means "not yet": the caller waits and asks again after the next change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from xtoken_core import schema
from xtoken_core.plan import window_positions
from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.run.blocks import BlockLease, Blocks
from xtoken_core.queue.run.rings import Ring, Slot
from xtoken_core.queue.run.slots import SlotClaim, SlotRef, SlotTable, signal_fields, teacher_task
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.queue.tasks.samples import Lease, Samples, Status, Task
from xtoken_core.wire import QueueError

__all__ = [
    "COLLATOR",
    "SUPERVISOR",
    "TEACHER",
    "TRAIN",
    "TRAINER",
    "RunProtocol",
    "SlotClaim",
    "SlotRef",
    "run_tasks",
    "signal_fields",
    "teacher_task",
]
TRAIN = "train"
COLLATOR, TEACHER, TRAINER = "collator", "teacher", "trainer"
SUPERVISOR = "control"
"""The role of whoever keeps a run going; it has no part in the protocol itself."""


def run_tasks(teachers: int) -> list[Task]:
    """The tasks of a run: one per teacher, which needs the row, and `train`, which needs every signal as well."""
    row = schema.INPUT_IDS.name
    tasks = [Task(teacher_task(i), frozenset({row}), "by_id") for i in range(teachers)]
    return [*tasks, Task(TRAIN, frozenset({row, *signal_fields(teachers)}), "by_id")]


class RunProtocol:
    """Everything the queue knows of one run.

    Attributes:
        cursor: The step whose window is worked on; every window below it is done.
        rewinds: How often the run was rewound: a request that names another number is out of date.
        finished: Positions that are trained, skipped or dead.
        skipped: Tombstones, with their reason.
        table: The slots with the teachers' signals.
        failed: Why the run was given up; empty while it goes on.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        positions: int,
        samples_per_step: int,
        block_size: int,
        span: int,
        teachers: int,
        ranks: int,
        slots: int,
        max_attempts: int = 3,
        max_dead: int = 0,
        group: int = 0,
        groups: int = 1,
    ) -> None:
        if samples_per_step % block_size or span < 3 * samples_per_step:
            raise QueueError("bad_request", "block_size must divide samples_per_step, and span be at least 3 steps")
        if not 0 <= group < groups or samples_per_step % (groups * block_size):
            raise QueueError("bad_request", f"group {group} of {groups} has no share of whole blocks in each step")
        self.positions = positions
        self.samples_per_step = samples_per_step
        self.group, self.groups = group, groups
        self.teachers, self.ranks = teachers, ranks
        self.max_dead = max_dead
        self.sessions = sessions
        sessions.on_end.append(self.session_ended)
        self.samples = Samples(run_tasks(teachers), max_attempts)
        share, first = samples_per_step // block_size // groups, samples_per_step // block_size // groups * group
        self.source = Blocks(positions, block_size, span, share=range(first, first + share), of=share * groups)
        self.table = SlotTable(self.samples, teachers, slots)
        self.rings, self.signals = self.table.rings, self.table.fields
        self.cursor = 0
        self.rewinds = 0
        self.trainers = -1
        self.finished = IntervalSet()
        self.skipped: dict[int, str] = {}
        self.failed = ""

    # Where the run is

    @property
    def ended(self) -> bool:
        """Whether every window is done."""
        return self.cursor * self.samples_per_step >= self.positions

    def window(self, step: int) -> range:
        """The positions of a step that this queue's node group owns."""
        run = {"samples_per_step": self.samples_per_step, "positions": self.positions}
        return window_positions(step, **run, group=self.group, groups=self.groups)

    def _check(self, rewinds: int) -> None:
        self._alive()
        if rewinds != self.rewinds:
            detail = {"step": self.cursor, "rewinds": self.rewinds}
            raise QueueError("rewound", f"the run was rewound to step {self.cursor}", detail)

    def _alive(self) -> None:
        if self.failed:
            raise QueueError("run_failed", self.failed)

    def give_up(self, reason: str) -> None:
        """End the run for everybody; the first reason stays."""
        self.failed = self.failed or reason

    # Collators

    def lease_block(self, session: str) -> BlockLease | None:
        """Lease the lowest free block inside the source's window.

        Raises:
            QueueError: `exhausted` once every window is done.
        """
        self._alive()
        if self.ended:
            raise QueueError("exhausted", "every position of the run is done")
        block = self.source.lowest_free(self.finished.first_gap())
        return None if block is None else self.source.lease(self.samples.next_lease_id(), session, block)

    def put_block(
        self, session: str, lease: int, ids: Sequence[int], tombstones: Mapping[int, str], fields: Iterable[str]
    ) -> list[int]:
        """Finish a leased block: every position has a row or a tombstone. Always admitted; returns the new rows.

        Raises:
            QueueError: `lease_revoked`; `bad_request` if a position is missing, doubled or foreign.
        """
        self._alive()
        block = self.source.held(lease, session)
        if sorted([*ids, *tombstones]) != list(range(*self.source.bounds(block.block))):
            raise QueueError("bad_request", f"a row or a tombstone for each position of block {block.block} is needed")
        if ids and schema.INPUT_IDS.name not in set(fields):
            raise QueueError("bad_request", f"the rows of a block need the column {schema.INPUT_IDS.name!r}")
        new = self.samples.produce(ids, fields)
        for position, reason in tombstones.items():
            self.skipped[position] = reason
            self.finished.add(position)
        del self.source.leases[lease]
        self.source.done.add(block.block)
        return new

    def refuse_block(self, session: str, lease: int, reason: str) -> None:
        """A nack for a whole block: after too many its positions are dead."""
        block = self.source.held(lease, session).block
        del self.source.leases[lease]
        self.source.refused[block] = self.source.refused.get(block, 0) + 1
        if self.source.refused[block] >= self.samples.max_attempts:
            self.source.done.add(block)
            self._bury(range(*self.source.bounds(block)), reason)

    # Teachers and trainers: reading a window's rows

    def window_ready(self, step: int, rewinds: int) -> list[int] | None:
        """Positions of the step that have a row, once all have a row or a tombstone; None before.

        Raises:
            QueueError: `rewound`; `exhausted` if the run ended; `already_done` is told by `step < cursor`.
        """
        self._check(rewinds)
        if step * self.samples_per_step >= self.positions:
            if self.ended:
                raise QueueError("exhausted", "every position of the run is done")
            return None
        held, dead = self.samples.samples, self.samples.dead
        window = self.window(step)
        if all(p in held or p in self.skipped or p in dead for p in window):
            return [p for p in window if p in held]
        return None

    # Teachers

    def trainer_of(self, rank: int) -> Session | None:
        """The trainer session of a rank that stands where the last rewind put it."""
        self._alive()
        for session in self.sessions.live.values():
            if session.role == TRAINER and session.rank == rank and session.incarnation == self.trainers:
                return session
        return None

    def announce_ring(self, session: str, teacher: int, rank: int, trainer: str, handle: bytes) -> Ring:
        """A teacher's ring for one trainer session; it replaces an older one of the pair.

        Raises:
            QueueError: `forbidden` for another role; `ring_closed` if that trainer has gone.
        """
        self._role(session, TEACHER)
        if teacher >= self.teachers or rank >= self.ranks:
            raise QueueError("bad_request", f"the run has {self.teachers} teachers and {self.ranks} ranks")
        current = self.trainer_of(rank)
        if current is None or current.id != trainer:
            raise QueueError("ring_closed", f"the trainer of rank {rank} is another one by now")
        old = self.rings.by_pair.get((teacher, rank))
        if old is not None:
            self.table.close(old)
        return self.rings.announce(teacher, rank, session, trainer, handle)

    def claim_slot(
        self, session: str, ring_id: int, ids: Sequence[int], rewinds: int, fields: Iterable[str] = ()
    ) -> SlotClaim | Status | None:
        """Lease a teacher's next micro-batch with a free slot; `Status.DONE` if its signal is there or was read.

        Raises:
            QueueError: `rewound`, `ring_closed`, `unknown_sample`.
        """
        self._check(rewinds)
        ring = self._ring(ring_id, teacher=session)
        if all(i < self.cursor * self.samples_per_step for i in ids):
            return Status.DONE
        return self.table.fill(session, ring, ids, fields)

    def slot_of(self, session: str, lease_id: int) -> tuple[Ring, int, Slot]:
        """The slot that a teacher's lease fills.

        Raises:
            QueueError: `lease_revoked` if there is none any more.
        """
        self.samples.held(lease_id, session)
        return self.table.slot_of(session, lease_id)

    def publish(self, session: str, lease_id: int) -> Lease:
        """The slot of a lease is full: put and ack in one.

        Raises:
            QueueError: `lease_revoked` if the run was rewound or the ring closed meanwhile.
        """
        self._alive()
        lease = self.samples.held(lease_id, session)
        self.table.publish(session, lease)
        return lease

    def refuse(self, session: str, lease_id: int, ids: Sequence[int], reason: str) -> list[int]:
        """A nack: the micro-batch is ready again without those that died of it; returns these.

        A trainer's nack also makes its step be done again.
        """
        self.samples.held(lease_id, session)
        self.table.refused(session, lease_id)
        died = self.samples.refuse(lease_id, ids, reason)
        self._bury(died, reason)
        return died

    # Trainers

    def opened(self, session: str, ring_id: int) -> None:
        """The trainer has opened the ring and read its canary."""
        self._ring(ring_id, trainer=session).opened = True

    def claim_batch(
        self, session: str, ids: Sequence[int], rewinds: int, fields: Iterable[str] = ()
    ) -> tuple[Lease, list[SlotRef]] | None:
        """Lease a micro-batch once every teacher's signal is there, and say where they lie.

        After a signal was withdrawn its place is missing: `check_step` will ask for the step to be done again.

        Raises:
            QueueError: `rewound`, `unknown_sample`; `conflict` if no slot holds this very micro-batch.
        """
        self._check(rewinds)
        rank = self._role(session, TRAINER).rank
        lease = self.samples.claim_ids(session, TRAIN, ids, fields)
        return None if lease is None else (lease, self.table.read(lease, rank, ids))

    def release(self, session: str, ring_id: int, index: int, generation: int) -> bool:
        """The backward that read a slot has completed; False for a filling that is gone already."""
        self._alive()
        try:
            ring = self._ring(ring_id, trainer=session)
        except QueueError:
            return False
        return self.table.release(ring, index, generation)

    def check_step(self, session: str, step: int, rewinds: int, dead: Iterable[int]) -> bool:
        """Whether the step must be done again: a signal was withdrawn under its reader, or a position died.

        `dead` are the dead positions of the window that the step's denominators leave out.
        """
        self._check(rewinds)
        died = {p for p in self.window(step) if p in self.samples.dead} != set(dead)
        return died or self.table.withdrawn(session)

    def ack_window(self, session: str, step: int, rewinds: int) -> list[int]:
        """The optimiser has taken the step; returns the positions whose rows go. Again for an old step: none.

        Raises:
            QueueError: `conflict` if a row of the window is not leased by a trainer.
        """
        self._check(rewinds)
        self._role(session, TRAINER)
        if step < self.cursor:
            return []
        window = self.window(step)
        held = self.samples.samples
        rows = [p for p in window if p in held]
        idle = [p for p in rows if p not in self.samples.dead and held[p].status[TRAIN] != Status.LEASED]
        if step > self.cursor or idle:
            at = f"the run is at step {self.cursor}, and {len(idle)} of its samples are not leased by a trainer"
            raise QueueError("conflict", f"step {step} cannot be acknowledged: {at}")
        self._let_go(rows)
        self.cursor = step + 1
        self.finished.add(0, min(self.cursor * self.samples_per_step, self.positions))  # other groups' share too
        self.source.passed(self.cursor * self.samples_per_step)
        return rows

    def rewind(self, session: str, step: int, skipped: Mapping[int, str], dead: Mapping[int, str]) -> list[int]:
        """Start (again) at a step; returns the positions whose rows are dropped. The only recovery path."""
        self._alive()
        caller = self._role(session, TRAINER)
        older = [s for s in self.sessions.live.values() if s.role == TRAINER and s.incarnation < caller.incarnation]
        for old in older:
            self.sessions.end(old.id, "a newer trainer has taken over")
        self.trainers = caller.incarnation
        self.rewinds += 1
        self.cursor = step
        start = step * self.samples_per_step
        self._take_over(start, skipped, dead)
        self.table.empty()
        keep = range(start, start + self.source.span)
        drop = [p for p in self.samples.samples if p not in keep]
        self._let_go(drop)
        self.samples.reset()
        self._recount(start, keep)
        return drop

    # Sessions

    def session_ended(self, session: str) -> None:
        """A session has ended: its leases are free again, and what only it could vouch for is withdrawn."""
        self.source.end_session(session)
        self.table.session_ended(session)
        for lease in self.samples.of_session(session):
            self.samples.give_back(lease.id)

    # Bookkeeping

    def _take_over(self, start: int, skipped: Mapping[int, str], dead: Mapping[int, str]) -> None:
        """Below the start a trainer's checkpoint knows better than this queue."""
        for known, told in ((self.skipped, skipped), (self.samples.dead, dead)):
            for position in [p for p in known if p < start]:
                del known[position]
            known.update({p: reason for p, reason in told.items() if p < start})

    def _recount(self, start: int, keep: range) -> None:
        """Finished positions and free blocks, after the cursor was set."""
        for known in (self.skipped, self.samples.dead):
            for position in [p for p in known if p >= keep.stop]:
                del known[position]
        self.finished = IntervalSet()
        self.finished.add(0, start)
        filled = IntervalSet()
        for position in sorted({*self.skipped, *self.samples.dead, *self.samples.samples}):
            if position >= start:
                filled.add(position)
                if position not in self.samples.samples or position in self.samples.dead:
                    self.finished.add(position)
        self.source.restart(start, filled)

    def _bury(self, positions: Iterable[int], reason: str) -> None:
        for position in positions:
            self.samples.bury(position, reason)
            self.finished.add(position)
        self.table.free_dead()
        if len(self.samples.dead) > self.max_dead:
            ids = ", ".join(map(str, sorted(self.samples.dead)[:20]))
            self.give_up(f"{len(self.samples.dead)} dead letters, {self.max_dead} are allowed: {ids}: {reason}")

    def _let_go(self, positions: Sequence[int]) -> None:
        self.table.let_go(positions)
        self.samples.drop(positions)

    def _role(self, session: str, role: str) -> Session:
        found = self.sessions.get(session)
        if found.role != role:
            raise QueueError("forbidden", f"only a {role} may do that, and {found.name!r} is a {found.role}")
        return found

    def _ring(self, ring_id: int, *, teacher: str | None = None, trainer: str | None = None) -> Ring:
        ring = self.rings.get(ring_id)
        if (teacher or ring.teacher_session) != ring.teacher_session:
            raise QueueError("forbidden", f"ring {ring_id} belongs to another teacher")
        if (trainer or ring.trainer_session) != ring.trainer_session:
            raise QueueError("forbidden", f"ring {ring_id} belongs to another trainer")
        return ring
