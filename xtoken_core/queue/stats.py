"""Statistics of a queue: one JSON document for terminals, the control plane and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from xtoken_core.queue.sample import Status

if TYPE_CHECKING:
    from xtoken_core.queue.engine import Engine
    from xtoken_core.queue.partition import Partition
    from xtoken_core.queue.sessions import Session

LEASE_AGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, float("inf"))


@dataclass(slots=True)
class _Group:
    """Samples in the same states."""

    status: Mapping[str, Status]
    count: int = 0
    nbytes: int = 0


def stats_document(engine: Engine) -> bytes:
    """Return the statistics of a queue as JSON; ages are in seconds."""
    now = engine.clock()
    document = {
        "uptime_s": now - engine.started,
        "bytes": engine.nbytes,
        "memory_limit": engine.memory_limit,
        "budget": {
            account: {"bytes": nbytes, "limit": engine.budget.limits[account]}
            for account, nbytes in engine.budget.bytes.items()
        },
        "requests": engine.counts,
        "waiting": engine.waiting(),
        "sessions": [_session(s, now) for s in engine.sessions.live.values()],
        "ended_sessions": [_session(s, now) for s in engine.sessions.ended.values()],
        "partitions": {name: _partition(part, engine, now) for name, part in engine.partitions.items()},
    }
    return msgspec.json.encode(document)


def _session(session: Session, now: float) -> dict[str, Any]:
    return {
        "id": session.public_id,
        "name": session.name,
        "role": session.role,
        "rank": session.rank,
        "incarnation": session.incarnation,
        "phase": session.phase,
        "activity": session.activity,
        "progress": session.progress,
        "progress_age_s": now - session.progress_at,
        "seen_age_s": now - session.last_seen,
        "ended": session.ended,
    }


def _partition(part: Partition, engine: Engine, now: float) -> dict[str, Any]:
    samples = part.samples
    tasks, task_bytes, sizes = {}, {}, part.store.sizes()
    # Samples in the same states share their mapping: each is looked at once, and not once per task.
    groups: dict[int, _Group] = {}
    for sample in samples.samples.values():
        if sample.id not in samples.dead:
            group = groups.get(id(sample.status)) or groups.setdefault(id(sample.status), _Group(sample.status))
            group.count += 1
            group.nbytes += sizes.get(sample.id, 0)
    for task in samples.tasks:
        counts, held = Counter[Status](), Counter[Status]()
        for group in groups.values():
            counts[group.status[task]] += group.count
            held[group.status[task]] += group.nbytes
        tasks[task] = {status.name.lower(): counts[status] for status in Status}
        task_bytes[task] = {status.name.lower(): held[status] for status in Status}
    ages = [now - engine.leased_at.get((part.name, i), now) for i in part.lease_ids()]
    document: dict[str, Any] = {
        "samples": len(samples.samples),
        "bytes": part.store.nbytes,
        "leases": len(samples.leases),
        "oldest_lease_s": max(ages, default=0.0),
        "lease_ages": {f"{bound:g}": sum(age <= bound for age in ages) for bound in LEASE_AGES_S},
        "rows_put": part.rows_put,
        "given_back": samples.given_back,
        "dead": len(samples.dead),
        "sealed": part.sealed,
        "dead_bytes": sum(sizes.get(i, 0) for i in samples.dead),
        "tasks": tasks,
        "task_bytes": task_bytes,
    }
    return document | part.statistics()
