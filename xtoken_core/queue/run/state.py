"""State of a run: its cursor, positions, samples, blocks and slots, and the steps that several calls share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xtoken_core import schema
from xtoken_core.plan import window_positions
from xtoken_core.prompt_plan import PromptPlan
from xtoken_core.queue.budget import ReasonMap
from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.run.names import TRAIN, signal_fields, teacher_task
from xtoken_core.queue.run.slots import RegisteredRing, SlotTable
from xtoken_core.queue.sample import Task
from xtoken_core.queue.samples import Samples
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m


def run_tasks(teachers: int) -> list[Task]:
    """Return the tasks of a run: one per teacher, which requires the row, and `train`, which also requires signals."""
    row = schema.INPUT_IDS.name
    tasks = [Task(teacher_task(i), frozenset({row}), "by_id") for i in range(teachers)]
    return [*tasks, Task(TRAIN, frozenset({row, *signal_fields(teachers)}), "by_id")]


class RunState:
    """State of one run.

    Args:
        sessions: Sessions of the queue.
        run: Size of the run.
        max_attempts: Refusals after which a sample or block is dead.

    Attributes:
        cursor: Current step; every window below it is done.
        rewinds: Number of rewinds; a request that names another one is out of date.
        finished: Positions that are trained, skipped or dead.
        skipped: Reason of every tombstone, by position.
        blocks: Blocks of positions and their leases.
        slots: Slots that hold the teachers' signals.
        prompts: Positions that are prompts.
        published: Step of the newest weights that rollout workers can read; None: none since the last rewind.
        weights_tag: Tag of the weights that were published last.
        trainer_incarnation: Incarnation of the trainers that the last rewind admitted.
        failed: Reason for which the run was given up; empty before.
    """

    def __init__(self, sessions: Sessions, run: m.RunDef, *, max_attempts: int) -> None:
        # Three steps: one that trains, one whose signals are made, one that is collated. With fewer, one of them waits.
        if run.samples_per_step % run.block_size or run.span < 3 * run.samples_per_step:
            raise QueueError("bad_request", "block_size must divide samples_per_step, and span be at least 3 steps")
        if not 0 <= run.group < run.groups or run.samples_per_step % (run.groups * run.block_size):
            raise QueueError(
                "bad_request", f"group {run.group} of {run.groups} has no share of whole blocks in each step"
            )
        ends = (run.prompts, run.prompts if run.last_prompts is None else run.last_prompts)
        # Both ends have prompts or neither has: a number that falls to 0 would leave steps without completions.
        whole = all(n % run.block_size == 0 and n <= run.samples_per_step for n in ends)
        if not whole or all(ends) != any(ends) or (any(ends) and run.groups > 1):
            raise QueueError(
                "bad_request", f"{ends[0]} to {ends[1]} prompts of a step must be whole blocks, in a single node group"
            )
        self.prompts = PromptPlan(
            run.samples_per_step, -(-run.positions // run.samples_per_step), run.after, *ends, unit=run.block_size
        )
        self.definition = run
        self.positions, self.samples_per_step = run.positions, run.samples_per_step
        self.sessions = sessions
        # Leases have no clock: beside their own calls, only the end of a session frees them.
        sessions.on_end.append(self.session_ended)
        self.samples = Samples(run_tasks(run.teachers), max_attempts)
        per_step = run.samples_per_step // run.block_size
        per_group = per_step // run.groups
        own = range(per_group * run.group, per_group * (run.group + 1))
        prompts = self.prompts if run.prompts else None
        self.blocks = Blocks(run.positions, run.block_size, run.span, own=own, per_step=per_step, prompts=prompts)
        self.slots = SlotTable(self.samples, run.teachers, run.slots)
        self.rings = self.slots.rings
        self.cursor = 0
        self.rewinds = 0
        self.published: int | None = None
        self.weights_tag = 0
        self.trainer_incarnation = -1
        self.finished = IntervalSet()
        self.skipped = ReasonMap()
        self.failed = ""

    # Position of the run

    @property
    def ended(self) -> bool:
        """Return whether every window is done."""
        return self.cursor * self.samples_per_step >= self.positions

    def window(self, step: int) -> range:
        """Return the positions of a step that this queue's node group owns."""
        size = {"samples_per_step": self.samples_per_step, "positions": self.positions}
        return window_positions(step, **size, group=self.definition.group, groups=self.definition.groups)

    def is_prompt(self, position: int) -> bool:
        """Return True for a position that a rollout worker completes."""
        return self.prompts.holds(position)

    def fail(self, reason: str) -> None:
        """Record why the run cannot continue; the first reason stays."""
        self.failed = self.failed or reason

    def session_ended(self, session: str) -> None:
        """Free the session's leases and withdraw its volatile signals."""
        self.blocks.end_session(session)
        self.slots.session_ended(session)
        for lease in self.samples.of_session(session):
            self.samples.give_back(lease.id)

    # Bookkeeping

    def _check_rewinds(self, rewinds: int) -> None:
        self._check_alive()
        if rewinds != self.rewinds:
            detail = {"step": self.cursor, "rewinds": self.rewinds}
            raise QueueError("rewound", f"the run was rewound to step {self.cursor}", detail)

    def _check_alive(self) -> None:
        if self.failed:
            raise QueueError("run_failed", self.failed)

    def _dead_of(self, ids: Iterable[int]) -> list[int]:
        return [i for i in ids if i in self.samples.dead]

    def _replace_below(self, start: int, skipped: Mapping[int, str], dead: Mapping[int, str]) -> None:
        """Replace what is skipped and dead below `start` by the checkpoint's record, which counts there."""
        # The last step may be a part of one, and its end lies beyond the run's.
        start = min(start, self.positions)
        for mine, recorded in ((self.skipped, skipped), (self.samples.dead, dead)):
            for position in [p for p in mine if p < start]:
                del mine[position]
            mine.update({p: reason for p, reason in recorded.items() if p < start})

    def _recount(self, start: int, keep: range) -> None:
        """Recompute finished positions and free blocks after the cursor was set.

        A tombstone of a prompt is dropped with the rows around it: its completion is generated anew. So is every other
        tombstone of a block that is free again, which may be put with a row in its place.
        """
        for position in [p for p in self.skipped if p >= start and self.is_prompt(p)]:
            del self.skipped[position]
        for reasons in (self.skipped, self.samples.dead):
            # Beyond the span rows are dropped as well: what is said of their positions is decided anew.
            for position in [p for p in reasons if p >= keep.stop]:
                del reasons[position]
        filled = IntervalSet()
        filled.add_all(p for p in {*self.skipped, *self.samples.dead, *self.samples.samples} if p >= start)
        self.blocks.restart(start, filled)
        for position in [p for p in self.skipped if p >= start and not self.blocks.is_done(p)]:
            del self.skipped[position]
        self.finished = IntervalSet()
        self.finished.add(0, min(start, self.positions))
        self.finished.add_all(p for p in {*self.skipped, *self.samples.dead} if p >= start)

    def refuse_block(self, block: int, reason: str, times: int = 1) -> None:
        """Count refusals of a block, whose positions die of `max_attempts`."""
        if self.blocks.count_refusals(block, times) >= self.samples.max_attempts:
            self.blocks.finish(block)
            self.mark_dead(range(*self.blocks.bounds(block)), reason)

    def admit(
        self, ids: Sequence[int], fields: Iterable[str], dead: Mapping[int, str], routes: Mapping[int, int]
    ) -> list[int]:
        """Add rows and dead positions, however many are allowed to die; return the new rows.

        Args:
            ids: Positions with a row.
            fields: The fields of the rows.
            dead: Dead positions with the reason.
            routes: By position the bits of the teachers that compare its row; without an entry all do.
        """
        new = self.samples.produce(ids, fields)
        self.slots.route({position: routes[position] for position in new if position in routes})
        for position, reason in dead.items():
            self.samples.mark_dead(position, reason)
            self.finished.add(position)
        return new

    def advance(self) -> list[int]:
        """Move past the current step; return the positions whose rows were dropped."""
        # The group's own share; other groups' rows are in other queues.
        rows = [p for p in self.window(self.cursor) if p in self.samples.samples]
        self._drop(rows)
        self.cursor += 1
        start = self.cursor * self.samples_per_step
        self.finished.add(0, min(start, self.positions))  # other groups' share too
        self.blocks.finish_below(start)
        return rows

    def mark_dead(self, positions: Sequence[int], reason: str) -> None:
        """Make positions dead letters; if there are any, and too many in all, the run fails."""
        for position in positions:
            self.samples.mark_dead(position, reason)
            self.finished.add(position)
        # Their slots would otherwise stay full for ever, and the teacher would wait for a free one.
        self.slots.free_dead()
        dead, allowed = self.samples.dead, self.definition.max_dead
        # An empty call says nothing new, and must not be what fails a run.
        if positions and len(dead) > allowed:
            ids = ", ".join(map(str, sorted(dead)[:20]))
            self.fail(f"{len(dead)} dead letters, {allowed} are allowed: {ids}: {reason}")

    def _drop(self, positions: Sequence[int]) -> None:
        self.slots.drop(positions)
        self.samples.drop(positions)

    def _require_role(self, session: str, role: str) -> Session:
        caller = self.sessions.get(session)
        if caller.role != role:
            raise QueueError("forbidden", f"only a {role} may do that, and {caller.name!r} is a {caller.role}")
        return caller

    def _ring(self, ring_id: int, *, teacher: str | None = None, trainer: str | None = None) -> RegisteredRing:
        ring = self.rings.get(ring_id)
        if (teacher or ring.teacher_session) != ring.teacher_session:
            raise QueueError("forbidden", f"ring {ring_id} belongs to another teacher")
        if (trainer or ring.trainer_session) != ring.trainer_session:
            raise QueueError("forbidden", f"ring {ring_id} belongs to another trainer")
        return ring


@dataclass(slots=True)
class BlockLease:
    """A block of positions that a collator works on."""

    id: int
    session: str
    block: int


@dataclass(eq=False)
class Blocks:
    """State of every block of a run: free, leased or done.

    Attributes:
        positions: Positions of the run.
        block_size: Positions per block.
        span: How far ahead of the lowest position not done blocks are leased, in positions.
        own: Blocks of each step that this queue's node group leases; the others belong to other groups' queues.
        per_step: Blocks per step.
        prompts: Positions that are prompts, in whole blocks; None: none.
        done: Blocks of which every position has its row or tombstone.
        leases: Blocks being worked on, by lease id.
        refused: Refusals per block that is not done.
    """

    positions: int
    block_size: int
    span: int
    own: range = range(1)
    per_step: int = 1
    prompts: PromptPlan | None = None
    done: IntervalSet = field(default_factory=IntervalSet)
    leases: dict[int, BlockLease] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the first and last (exclusive) position of a block."""
        return block * self.block_size, min((block + 1) * self.block_size, self.positions)

    def holds_prompts(self, block: int) -> bool:
        """Return True for a block of prompts."""
        return self.prompts is not None and self.prompts.holds(block * self.block_size)

    def is_done(self, position: int) -> bool:
        """Return whether the block of a position is done."""
        return position // self.block_size in self.done

    def lowest_free(self, floor: int, limit: int | None = None) -> int | None:
        """Return the lowest free block of text that ends inside `[floor, floor + span)`.

        Args:
            floor: Lowest position not done.
            limit: For a block of prompts: the position at which it ends at most; None: a block of text.
        """
        stop = floor + self.span if limit is None else min(floor + self.span, limit)
        leased = {lease.block for lease in self.leases.values()}
        block = self.done.first_gap(floor // self.block_size)
        # Blocks end inside the span too, since the span bounds the rows that the queue holds.
        while self.bounds(block)[0] < self.positions and self.bounds(block)[1] <= stop:
            wanted = self.holds_prompts(block) == (limit is not None)
            if wanted and block % self.per_step in self.own and block not in leased:
                return block
            block = self.done.first_gap(block + 1)
        return None

    def finish(self, block: int) -> None:
        """Mark a block as done; its refusals are forgotten."""
        self.done.add(block)
        self.refused.pop(block, None)

    def finish_below(self, position: int) -> None:
        """Mark every block below a position, a step's boundary, as done, and revoke the leases of those."""
        self.done.add(0, position // self.block_size)
        # Its collator may still work on one: that put is refused as revoked.
        self.leases = {number: lease for number, lease in self.leases.items() if lease.block not in self.done}
        self._forget_refusals()

    def lease(self, lease_id: int, session: str, block: int) -> BlockLease:
        """Lease a free block to a session."""
        self.leases[lease_id] = BlockLease(lease_id, session, block)
        return self.leases[lease_id]

    def held(self, lease_id: int, session: str) -> BlockLease:
        """Return a current lease of the session.

        Raises:
            QueueError: `lease_revoked`.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.session != session:
            raise QueueError("lease_revoked", f"block lease {lease_id} was revoked")
        return lease

    def count_refusals(self, block: int, times: int) -> int:
        """Count refusals of a block; return how many it has."""
        self.refused[block] = self.refused.get(block, 0) + times
        return self.refused[block]

    def end_session(self, session: str) -> None:
        """Free the blocks of an ended session."""
        self.leases = {number: lease for number, lease in self.leases.items() if lease.session != session}

    def restart(self, start: int, filled: IntervalSet) -> None:
        """Free every block from position `start` on unless all its positions are in `filled`; blocks below are done."""
        self.leases.clear()
        self.done = IntervalSet()
        self.done.add(0, start // self.block_size)
        block = start // self.block_size
        # Beyond the last filled position every block is free, so the search ends there and not at the run's end.
        highest = max((stop for _, stop in filled.intervals()), default=start)
        while self.bounds(block)[0] < min(highest, self.positions):
            first, last = self.bounds(block)
            if filled.first_gap(first) >= last:
                self.done.add(block)
            block += 1
        self._forget_refusals()

    def _forget_refusals(self) -> None:
        self.refused = {block: times for block, times in self.refused.items() if block not in self.done}
