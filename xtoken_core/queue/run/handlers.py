"""The calls of a run's pipeline. None as an answer means "not yet"."""

from __future__ import annotations

from xtoken_core.queue.partition import Partition
from xtoken_core.queue.response import Response
from xtoken_core.queue.run.protocol import COLLATOR, SlotClaim, SlotRef
from xtoken_core.queue.sessions import Sessions
from xtoken_core.wire import Column, QueueError, object_column
from xtoken_core.wire import messages as m


def lease_block(part: Partition, request: m.LeaseBlock, sessions: Sessions) -> Response | None:
    """The lowest free block inside the window."""
    if sessions.get(request.session).role != COLLATOR:
        raise QueueError("forbidden", "only a collator leases blocks")
    run = part.the_run()
    lease = run.lease_block(request.session)
    if lease is None:
        return None
    first, stop = run.source.bounds(lease.block)
    return Response(m.Block(lease=lease.id, first=first, count=stop - first))


def window(part: Partition, request: m.Window) -> Response | None:
    """The rows of a step, once all are there."""
    run = part.the_run()
    ids = run.window_ready(request.step, request.rewinds)
    if request.step < run.cursor:
        return Response(m.AlreadyDone())
    if ids is None:
        return None
    positions = run.window(request.step)
    dead = [p for p in positions if p in run.samples.dead]
    held = set(ids)
    reply = m.WindowRows(ids=ids, skipped=[p for p in positions if p not in held], dead=dead)
    return Response(reply, part.store.read(ids, request.fields))


def await_trainer(part: Partition, request: m.AwaitTrainer) -> Response | None:
    """The trainer of a rank, once a rewind has put it into place."""
    run = part.the_run()
    if run.ended:
        raise QueueError("exhausted", "every position of the run is done")
    trainer = run.trainer_of(request.rank)
    if trainer is None:
        return None
    return Response(m.Trainer(trainer=trainer.id, step=run.cursor, rewinds=run.rewinds))


def announce_ring(part: Partition, request: m.AnnounceRing) -> Response:
    """A teacher offers its ring."""
    run = part.the_run()
    ring = run.announce_ring(request.session, request.teacher, request.rank, request.trainer, request.handle)
    return Response(m.Ring(ring=ring.id))


def await_ring(part: Partition, request: m.AwaitRing, sessions: Sessions) -> Response | None:
    """The ring that a teacher has announced to this trainer session."""
    run = part.the_run()
    rank = sessions.get(request.session).rank
    ring = run.rings.by_pair.get((request.teacher, rank))
    if ring is None or ring.trainer_session != request.session:
        return None
    return Response(m.Ring(ring=ring.id, handle=ring.handle))


def opened_ring(part: Partition, request: m.OpenedRing) -> Response:
    """The trainer has opened a ring."""
    part.the_run().opened(request.session, request.ring)
    return Response(m.Ok())


def await_opened(part: Partition, request: m.AwaitOpened) -> Response | None:
    """The teacher learns that its ring was opened."""
    return Response(m.Ok()) if part.the_run().rings.get(request.ring).opened else None


def claim_slot(part: Partition, request: m.ClaimSlot) -> Response | None:
    """A teacher's next micro-batch, with a slot."""
    run = part.the_run()
    _check_distinct(request.ids)
    claim = run.claim_slot(request.session, request.ring, request.ids, request.rewinds, request.fields)
    if claim is None:
        return None
    if not isinstance(claim, SlotClaim):
        return Response(m.AlreadyDone())
    dead = [i for i in request.ids if i in run.samples.dead]
    reply = m.Claimed(lease=claim.lease, ids=request.ids, dead=dead, slot=claim.slot, generation=claim.generation)
    return Response(reply, part.store.read(request.ids, request.fields))


def complete(part: Partition, request: m.Complete, columns: dict[str, Column]) -> Response:
    """A teacher's slot is full. Where its signal comes through the queue, the columns are the slot's rows."""
    run, signals = part.the_run(), part.the_signals()
    if columns:
        ring, index, slot = run.slot_of(request.session, request.lease)
        ids, generation = slot.ids, slot.generation
        signals.check(ring.teacher, ids, columns)
        part.check(columns)
    run.publish(request.session, request.lease)
    if columns:
        part.learn(columns)
        signals.keep(ring.id, index, generation, ids, columns)
    return Response(m.Ok())


def claim_batch(part: Partition, request: m.ClaimBatch) -> Response | None:
    """A trainer's micro-batch with the place of every teacher's signal."""
    run = part.the_run()
    _check_distinct(request.ids)
    found = run.claim_batch(request.session, request.ids, request.rewinds, request.fields)
    if found is None:
        return None
    lease, refs = found
    columns = part.store.read(request.ids, request.fields)
    for ref in refs:
        teacher = run.rings.get(ref.ring).teacher
        columns |= part.the_signals().read(ref.ring, ref.slot, ref.generation)
        columns[run.signals[teacher]] = object_column([_place(ref, i) for i in request.ids])
    dead = [i for i in request.ids if i in run.samples.dead]
    return Response(m.Claimed(lease=lease.id, ids=request.ids, dead=dead), columns)


def release(part: Partition, request: m.Release) -> Response:
    """The backward that read a slot has completed."""
    part.the_run().release(request.session, request.ring, request.slot, request.generation)
    return Response(m.Ok())


def check_step(part: Partition, request: m.CheckStep) -> Response:
    """May the step be taken?"""
    redo = part.the_run().check_step(request.session, request.step, request.rewinds, request.dead)
    return Response(m.Verdict(redo=redo))


def ack_window(part: Partition, request: m.AckWindow) -> Response:
    """The step is taken."""
    part.let_go(part.the_run().ack_window(request.session, request.step, request.rewinds))
    return Response(m.Ok())


def rewind(part: Partition, request: m.Rewind) -> Response:
    """Start (again) at a step."""
    run = part.the_run()
    part.let_go(run.rewind(request.session, request.step, request.skipped, request.dead))
    return Response(m.Rewound(rewinds=run.rewinds))


def give_up(part: Partition, request: m.Giveup) -> Response:
    """End the run for everybody."""
    part.the_run().give_up(request.reason)
    return Response(m.Ok())


def _check_distinct(ids: list[int]) -> None:
    if len(set(ids)) < len(ids):
        raise QueueError("bad_request", "an id is there twice")


def _place(ref: SlotRef, sample_id: int) -> dict[str, int]:
    return {"ring": ref.ring, "slot": ref.slot, "row": ref.rows[sample_id], "generation": ref.generation}
