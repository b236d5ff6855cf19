"""The generic queue's calls: partitions of samples with fields and tasks. None as an answer means "not yet"."""

from __future__ import annotations

from xtoken_core.queue.partition import Partition
from xtoken_core.queue.response import Response
from xtoken_core.queue.tasks.samples import Lease, Status
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire import messages as m


def put(part: Partition, request: m.Put, columns: dict[str, Column], room: int) -> Response:
    """Store columns for ids; a block's lease is finished by it and always admitted."""
    _check_rows(columns, len(request.ids))
    if len(set(request.ids)) < len(request.ids):
        raise QueueError("bad_request", "an id is there twice")
    size = sum(c.nbytes for c in columns.values())
    part.check(columns)
    if request.lease is not None:
        new = part.the_run().put_block(request.session, request.lease, request.ids, request.tombstones, columns)
    else:
        if part.run is not None:
            raise QueueError("forbidden", "rows of a run are put with the lease of their block")
        if part.sealed:
            raise QueueError("conflict", f"partition {part.name!r} is sealed")
        if request.tombstones:
            raise QueueError("bad_request", "tombstones belong to the block of a run")
        if size > room:
            raise QueueError("no_room", f"{size} bytes do not fit into {max(room, 0)}", {"room": max(room, 0)})
        lacking = part.lacking(request.ids, columns)
        new = part.samples.produce(request.ids, columns)
        part.vouch(request.session, lacking)
    part.keep(request.ids, columns, new)
    return Response(m.Stored(room=max(room - size, 0)))


def get(part: Partition, request: m.Get) -> Response | None:
    """Read fields of samples, once all are there."""
    held, finished = part.samples.samples, part.samples.finished
    missing = part.samples.lacking(request.ids, request.fields)
    if missing:
        gone = [i for i in missing if i in finished]
        if request.wait_s and not gone and not part.sealed:
            return None
        first = (gone or missing)[0]
        lacks = sorted(set(request.fields) - (held[first].fields if first in held else set()))
        raise QueueError("unknown_sample", f"sample {first} has no {', '.join(lacks) or 'row'} here")
    return Response(m.Rows(ids=request.ids, columns=[]), part.store.read(request.ids, request.fields))


def claim(part: Partition, request: m.Claim) -> Response | None:
    """Lease samples of a task, by ids or in the task's order."""
    _generic(part)
    task = part.task(request.task)
    if bool(request.ids) == bool(request.count):
        raise QueueError("bad_request", "a claim names either ids or a count")
    if len(set(request.ids)) < len(request.ids):
        raise QueueError("bad_request", "an id is there twice")
    dead = [i for i in request.ids if i in part.samples.dead]
    if request.ids and len(dead) == len(request.ids):
        return Response(m.Claimed(lease=0, ids=[], dead=dead))
    lease = _lease(part, request, task)
    if lease is None:
        if part.exhausted(task):
            raise QueueError("exhausted", f"task {task!r} has done everything that partition {part.name!r} will hold")
        return None
    columns = part.store.read(lease.ids, request.fields)
    return Response(m.Claimed(lease=lease.id, ids=list(lease.ids), dead=dead), columns)


def _lease(part: Partition, request: m.Claim, task: str) -> Lease | None:
    if request.ids:
        return part.samples.claim_ids(request.session, task, request.ids, request.fields)
    if part.samples.tasks[task].order == "by_id":
        raise QueueError("bad_request", f"task {task!r} is claimed by ids only")
    return part.samples.claim_next(request.session, task, request.count, request.fields)


def complete(part: Partition, request: m.Complete, columns: dict[str, Column], room: int) -> Response:
    """Put a lease's result and finish the lease; results have room of their own, or inputs could lock them out."""
    _generic(part)
    lease = part.samples.held(request.lease, request.session)
    _check_rows(columns, len(lease.ids))
    part.check(columns)
    size = sum(c.nbytes for c in columns.values())
    if size > room:
        raise QueueError("no_room", f"{size} bytes do not fit into {max(room, 0)}", {"room": max(room, 0)})
    ids = lease.ids
    lacking = part.lacking(ids, columns)
    new = part.samples.produce(ids, columns) if columns else []
    part.keep(ids, columns, new)
    part.vouch(request.session, lacking, lease.task)
    part.let_go(part.samples.finish(lease.task, ids))
    return Response(m.Ok())


def ack(part: Partition, request: m.Ack) -> Response:
    """A task has done samples that the session holds."""
    _generic(part)
    task = part.task(request.task)
    mine = part.samples.held_by(request.session, task, request.ids)
    done = part.samples.samples
    strange = [
        i
        for i in request.ids
        if i not in mine and i not in part.samples.finished and (i not in done or done[i].status[task] != Status.DONE)
    ]
    if strange:
        raise QueueError("lease_revoked", f"sample {strange[0]} is not leased to this session for task {task!r}")
    part.let_go(part.samples.finish(task, mine))
    return Response(m.Ok())


def nack(part: Partition, request: m.Nack) -> Response:
    """Samples of a lease could not be done."""
    run = part.run
    if run is not None and request.lease in run.source.leases:
        run.refuse_block(request.session, request.lease, request.reason)
    elif run is not None:
        run.refuse(request.session, request.lease, request.ids, request.reason)
    else:
        part.samples.held(request.lease, request.session)
        part.samples.refuse(request.lease, request.ids, request.reason)
    return Response(m.Ok())


def clear(part: Partition, request: m.Clear) -> Response:
    """Forget samples."""
    _generic(part)
    if request.everything:
        part.start_over()
    else:
        part.forget(request.ids)
    return Response(m.Ok())


def list_samples(part: Partition, request: m.ListSamples) -> Response:
    """Ids in a state, ascending."""
    samples = part.samples
    reasons: dict[int, str] = {}
    if request.state == "dead":
        reasons = samples.dead
        found = set(samples.dead)
    elif request.state == "skipped":
        reasons = part.run.skipped if part.run else {}
        found = set(reasons)
    else:
        task = part.task(request.task)
        try:
            status = Status[request.state.upper()]
        except KeyError:
            raise QueueError("bad_request", f"unknown state {request.state!r}") from None
        found = {s.id for s in samples.samples.values() if s.status[task] == status and s.id not in samples.dead}
    ids = sorted(i for i in found if i > request.after)[: request.limit]
    return Response(m.Listed(ids=ids, reasons={i: reasons[i] for i in ids if i in reasons}))


def peek(part: Partition, request: m.Peek) -> Response:
    """What is known of one sample."""
    sample = part.samples.samples.get(request.sample)
    reason = part.samples.dead.get(request.sample, "")
    if part.run is not None:
        reason = reason or part.run.skipped.get(request.sample, "")
    if sample is None and not reason:
        raise QueueError("unknown_sample", f"sample {request.sample} is not here")
    status = {name: state.name.lower() for name, state in sample.status.items()} if sample else {}
    attempts = sample.attempts if sample else 0
    fields = part.store.fields(request.sample)
    return Response(m.Peeked(fields=fields, status=status, attempts=attempts, reason=reason))


def _generic(part: Partition) -> None:
    if part.run is not None:
        raise QueueError("forbidden", f"partition {part.name!r} belongs to a run: it has calls of its own")


def _check_rows(columns: dict[str, Column], rows: int) -> None:
    for name, column in columns.items():
        if column.rows != rows:
            raise QueueError("bad_request", f"column {name!r} has {column.rows} rows for {rows} samples")
