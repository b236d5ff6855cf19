"""Protocol of a run: a state machine over typed requests that grants blocks, slots and steps in plan order.

Pure transitions without clock, socket or tensor; `tests/unit/queue/test_model.py` explores them state by state.
A method that returns None means "not yet": the caller waits and asks again after the next change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from xtoken_core import schema
from xtoken_core.queue.run.names import COLLATOR, ROLLOUT, TEACHER, TRAIN, TRAINER
from xtoken_core.queue.run.slots import Filling, RegisteredRing, Slot
from xtoken_core.queue.run.state import RunState
from xtoken_core.queue.sample import Status
from xtoken_core.queue.samples import check_distinct
from xtoken_core.queue.sessions import Session
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m

NO_ROUTES: Mapping[int, int] = MappingProxyType({})
"""Of rows that all teachers compare."""


class RunProtocol(RunState):
    """Calls of a run's workers; each takes its request and returns its reply, or the rows that the reply is about."""

    def give_up(self, request: m.Giveup) -> m.Ok:
        """End the run for all workers."""
        self.fail(request.reason)
        return m.Ok()

    # Collators and rollout workers

    def lease_block(self, request: m.LeaseBlock) -> m.Block | None:
        """Lease the lowest free block inside the span: of text to a collator, of prompts to a rollout worker.

        The span of prompts is narrower: it ends with the last step for which the published weights are not too old.

        Raises:
            QueueError: `exhausted` once every window is done; `forbidden` for another role.
        """
        caller = self.sessions.get(request.session)
        if caller.role != ROLLOUT:
            self._require_role(request.session, COLLATOR)
        self._check_alive()
        if self.ended:
            raise QueueError("exhausted", "every position of the run is done")
        version = limit = None
        if caller.role == ROLLOUT:
            version = self.published
            if version is None:
                return None
            # Exclusive end of the last step that may still train completions of these weights.
            limit = self.last_step_of(version) * self.samples_per_step + self.samples_per_step
        block = self.blocks.lowest_free(self.finished.first_gap(), limit)
        if block is None:
            return None
        lease = self.blocks.lease(self.samples.next_lease_id(), request.session, block)
        first, stop = self.blocks.bounds(block)
        if version is None:
            return m.Block(lease=lease.id, first=first, count=stop - first)
        return m.Block(lease=lease.id, first=first, count=stop - first, version=version, tag=self.weights_tag)

    def last_step_of(self, version: int) -> int:
        """Return the last step that may train a completion by the weights of a step."""
        return version + self.definition.max_staleness

    def put_block(self, request: m.Put, fields: Iterable[str], routes: Mapping[int, int] = NO_ROUTES) -> list[int]:
        """Finish a leased block with a row or a tombstone for each position; return the new rows.

        The put of a leased block is always admitted: back-pressure is in the lease.

        Raises:
            QueueError: `lease_revoked`; `bad_request` if a position is missing, doubled or foreign; `forbidden` without
                a lease.
        """
        if request.lease is None:
            raise QueueError("forbidden", "rows of a run are put with the lease of their block")
        self._check_alive()
        lease = self.blocks.held(request.lease, request.session)
        # Checked and admitted as a whole before the lease goes: a refused put leaves the block with its collator.
        new = self.fill_block(lease.block, request.ids, fields, request.tombstones, routes=routes)
        del self.blocks.leases[lease.id]
        return new

    def fill_block(
        self,
        block: int,
        ids: Sequence[int],
        fields: Iterable[str],
        tombstones: Mapping[int, str],
        dead: Mapping[int, str] = MappingProxyType({}),
        routes: Mapping[int, int] = NO_ROUTES,
    ) -> list[int]:
        """Finish a block with its rows and tombstones; return the new rows.

        A position whose row was kept when a rewind re-opened the block keeps it, and gets no tombstone.

        The replay of a journal calls it too, where the run may have failed by a record before this one, and positions
        may be `dead`, with or without a row.

        Raises:
            QueueError: `bad_request`, as for `put_block`.
        """
        named = [*ids, *tombstones, *(dead.keys() - {*ids, *tombstones})]
        # Also refuses doubles: a position stands in one of the three places, or the block is not done.
        if sorted(named) != list(range(*self.blocks.bounds(block))):
            raise QueueError("bad_request", f"a row or a tombstone for each position of block {block} is needed")
        if ids and schema.INPUT_IDS.name not in set(fields):
            raise QueueError("bad_request", f"the rows of a block need the column {schema.INPUT_IDS.name!r}")
        new = self.admit(ids, fields, dead, routes)
        for position, reason in tombstones.items():
            # Kept over a rewind: the row counts, and a tombstone beside it would skip a position that is trained.
            if position not in self.samples.samples:
                self.skipped[position] = reason
                self.finished.add(position)
        self.blocks.finish(block)
        return new

    # Collators, teachers and trainers

    def nack(self, request: m.Nack) -> m.Ok:
        """Refuse a block or a micro-batch.

        A block's positions die after `max_attempts` refusals. A micro-batch is ready again without the samples that
        died of it; if a trainer refuses it, its step is repeated.
        """
        # Leases of blocks and of samples have numbers of one counter, so the table decides which it is.
        if request.lease in self.blocks.leases:
            block = self.blocks.held(request.lease, request.session).block
            del self.blocks.leases[request.lease]
            self.refuse_block(block, request.reason)
        else:
            self.samples.held(request.lease, request.session)
            self.slots.refuse(request.session, request.lease)
            self.mark_dead(self.samples.refuse(request.lease, request.ids, request.reason), request.reason)
        return m.Ok()

    # Teachers and trainers

    def read_window(self, request: m.Window) -> m.WindowRows | m.AlreadyDone | None:
        """Return the positions of a step with and without a row, once each has its row or tombstone.

        Raises:
            QueueError: `rewound`; `exhausted` if the run has ended.
        """
        self._check_rewinds(request.rewinds)
        if request.step * self.samples_per_step >= self.positions and self.ended:
            raise QueueError("exhausted", "every position of the run is done")
        # An old step is no error: a slow teacher learns from it that the run is past it.
        if request.step < self.cursor:
            return m.AlreadyDone()
        if request.step * self.samples_per_step >= self.positions:
            return None  # a rewind may still come
        # All or nothing: a plan of a part of the window would differ from the trainer's.
        held, dead = self.samples.samples, self.samples.dead
        window = self.window(request.step)
        if not all(p in held or p in self.skipped or p in dead for p in window):
            return None
        return m.WindowRows(
            ids=[p for p in window if p in held],
            skipped=[p for p in window if p not in held],
            dead=[p for p in window if p in dead],
        )

    # Teachers

    def await_trainer(self, request: m.AwaitTrainer) -> m.Trainer | None:
        """Return the trainer session of a rank, once a rewind has admitted it."""
        if self.ended:
            raise QueueError("exhausted", "every position of the run is done")
        trainer = self.trainer_of(request.rank)
        if trainer is None:
            return None
        return m.Trainer(trainer=trainer.public_id, step=self.cursor, rewinds=self.rewinds)

    def trainer_of(self, rank: int) -> Session | None:
        """Return the trainer session of a rank that the last rewind admitted."""
        self._check_alive()
        for session in self.sessions.live.values():
            # By incarnation too: until the rewind of a takeover, both sessions of a rank may live.
            if session.role == TRAINER and session.rank == rank and session.incarnation == self.trainer_incarnation:
                return session
        return None

    def announce_ring(self, request: m.AnnounceRing) -> m.Ring:
        """Add a teacher's ring for one trainer session, in place of an older one of the pair.

        Raises:
            QueueError: `forbidden` for another role; `ring_closed` if that trainer has gone.
        """
        self._require_role(request.session, TEACHER)
        teacher, rank = request.teacher, request.rank
        teachers, ranks = self.definition.teachers, self.definition.ranks
        if teacher >= teachers or rank >= ranks:
            raise QueueError("bad_request", f"the run has {teachers} teachers and {ranks} ranks")
        # The teacher has asked for its trainer before; that one may have been replaced in between.
        current = self.trainer_of(rank)
        if current is None or current.public_id != request.trainer:
            raise QueueError("ring_closed", f"the trainer of rank {rank} is another one by now")
        old = self.rings.by_pair.get((teacher, rank))
        if old is not None:
            # A pair has one ring: signals of the old one are withdrawn before the new one is known.
            self.slots.close(old)
        return m.Ring(ring=self.rings.announce(teacher, rank, request.session, current.id, request.handle).id)

    def await_opened(self, request: m.AwaitOpened) -> m.Ok | None:
        """Reply once the trainer has opened the teacher's ring."""
        return m.Ok() if self.rings.get(request.ring).opened else None

    def claim_slot(self, request: m.ClaimSlot) -> m.Claimed | m.AlreadyDone | None:
        """Lease a teacher's next micro-batch with a free slot.

        Raises:
            QueueError: `rewound`, `ring_closed`, `unknown_sample`.
        """
        check_distinct(request.ids)
        self._check_rewinds(request.rewinds)
        ring = self._ring(request.ring, teacher=request.session)
        if all(i < self.cursor * self.samples_per_step for i in request.ids):
            return m.AlreadyDone()
        filling = self.slots.fill(request.session, ring, request.ids, request.fields)
        if not isinstance(filling, Filling):
            return None if filling is None else m.AlreadyDone()
        dead = self._dead_of(request.ids)
        return m.Claimed(
            lease=filling.lease, ids=request.ids, dead=dead, slot=filling.slot, generation=filling.generation
        )

    def slot_of(self, session: str, lease: int) -> tuple[RegisteredRing, int, Slot]:
        """Return ring, index and slot that a teacher's lease fills.

        Raises:
            QueueError: `lease_revoked` if there is none any more.
        """
        self.samples.held(lease, session)
        return self.slots.slot_of(session, lease)

    def complete(self, request: m.Complete) -> m.Ok:
        """Mark the slot of a lease as full: put and ack in one.

        Raises:
            QueueError: `lease_revoked` if the run was rewound or the ring closed meanwhile.
        """
        self._check_alive()
        self.slots.mark_full(request.session, self.samples.held(request.lease, request.session))
        return m.Ok()

    # Trainers

    def await_ring(self, request: m.AwaitRing) -> m.Ring | None:
        """Return the ring that a teacher has announced to this trainer session."""
        rank = self.sessions.get(request.session).rank
        ring = self.rings.by_pair.get((request.teacher, rank))
        if ring is None or ring.trainer_session != request.session:
            return None
        return m.Ring(ring=ring.id, handle=ring.handle)

    def confirm_ring(self, request: m.OpenedRing) -> m.Ok:
        """Mark a ring as opened by its trainer, which has read the canary."""
        self._ring(request.ring, trainer=request.session).opened = True
        return m.Ok()

    def claim_batch(self, request: m.ClaimBatch) -> m.Claimed | None:
        """Lease a micro-batch once every teacher's signal is there, with the slots that hold them.

        After a signal was withdrawn its slot is missing: `check_step` will ask for the step to be repeated.

        Raises:
            QueueError: `rewound`, `unknown_sample`; `conflict` if no slot holds this very micro-batch.
        """
        check_distinct(request.ids)
        self._check_rewinds(request.rewinds)
        rank = self._require_role(request.session, TRAINER).rank
        lease = self.samples.claim_ids(request.session, TRAIN, request.ids, request.fields)
        if lease is None:
            return None
        # After the lease: `read` undoes it itself if trainer and teacher disagree about the micro-batch.
        slots = self.slots.read(lease, rank, request.ids)
        return m.Claimed(lease=lease.id, ids=request.ids, dead=self._dead_of(request.ids), slots=slots)

    def release(self, request: m.Release) -> m.Ok:
        """Free a slot after the backward that read it; a filling that is gone already is ignored."""
        self._check_alive()
        try:
            ring = self._ring(request.ring, trainer=request.session)
        except QueueError:
            return m.Ok()
        self.slots.release(ring, request.slot, request.generation)
        return m.Ok()

    def check_step(self, request: m.CheckStep) -> m.Verdict:
        """Return whether the step must be repeated: a signal was withdrawn before its release, or a position died."""
        self._check_rewinds(request.rewinds)
        # Compared with what the trainer knew when it planned: a position that died since has changed the denominators.
        died = {p for p in self.window(request.step) if p in self.samples.dead} != set(request.dead)
        return m.Verdict(redo=died or self.slots.withdrawn(request.session))

    def ack_window(self, request: m.AckWindow) -> list[int]:
        """Advance past a step that the optimiser has taken; return the positions whose rows were dropped.

        Raises:
            QueueError: `conflict` if a row of the window is not leased by a trainer.
        """
        self._check_rewinds(request.rewinds)
        self._require_role(request.session, TRAINER)
        step, held = request.step, self.samples.samples
        if step < self.cursor:
            return []
        rows = [p for p in self.window(step) if p in held]
        # A row without a trainer's lease was not in the step: acknowledging it would lose it.
        idle = [p for p in rows if p not in self.samples.dead and held[p].status[TRAIN] != Status.LEASED]
        if step > self.cursor or idle:
            at = f"the run is at step {self.cursor}, and {len(idle)} of its samples are not leased by a trainer"
            raise QueueError("conflict", f"step {step} cannot be acknowledged: {at}")
        return self.advance()

    def publish(self, request: m.Publish) -> m.Ok:
        """Let rollout workers use the trainer's weights of the current step.

        Raises:
            QueueError: `bad_request` in a run without prompts; `conflict` at another step than the run's.
        """
        self._check_rewinds(request.rewinds)
        self._require_role(request.session, TRAINER)
        if not self.definition.prompts:
            raise QueueError("bad_request", "the run has no prompts: its weights are not published")
        if request.step != self.cursor:
            raise QueueError("conflict", f"weights of step {request.step} are published, the run is at {self.cursor}")
        self.published, self.weights_tag = request.step, request.tag
        return m.Ok()

    def rewind(self, request: m.Rewind) -> list[int]:
        """Start, or start again, at a step; return the positions whose rows were dropped. The only recovery path.

        Completions are dropped with the weights that generated them, which may be of steps that no longer count.
        """
        self._check_alive()
        caller = self._require_role(request.session, TRAINER)
        older = [s for s in self.sessions.live.values() if s.role == TRAINER and s.incarnation < caller.incarnation]
        for old in older:
            self.sessions.end(old.id, "a newer trainer has taken over")
        # Ranks of this incarnation follow; a rank of an older one that wakes up now is refused everywhere.
        self.trainer_incarnation = caller.incarnation
        # Every request names the count it knows: what was under way is answered by `rewound` from here on.
        self.rewinds += 1
        self.cursor = request.step
        start = request.step * self.samples_per_step
        # Below the checkpoint its record counts, whatever this queue has seen after it was written.
        self._replace_below(start, request.skipped, request.dead)
        self.slots.clear()
        keep = range(start, start + self.blocks.span)
        # Weights of steps beyond the checkpoint may never come about again: completions wait for new ones.
        self.published = None
        dead = self.samples.dead  # the row of a dead completion stays: nothing is generated for it any more
        drop = [p for p in self.samples.samples if p not in keep or (self.is_prompt(p) and p not in dead)]
        self._drop(drop)
        self.samples.reset()
        self.slots.route(self.slots.routes)  # `reset` has made samples wait for teachers that do not compare them
        self._recount(start, keep)
        return drop
