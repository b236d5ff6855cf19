"""What a supervisor tells of its run: a status for those who watch, attempts and pids for those who come later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.supervisor.node_groups import Sites
from services.supervisor.process_group import Group, Worker
from services.supervisor.queue_monitor import session_of


def status_of(groups: Sequence[Group], sites: Sites, steps: int) -> dict[str, Any]:
    """Where a run stands, as its queues were last seen; ages are seconds, sizes bytes."""
    workers = [
        _worker_status(group, worker, sites[worker.member.node].observer.stats)
        | {"where": sites.where(worker.member.node)}
        for group in groups
        for worker in group.workers
    ]
    return {**sites.document(), "steps": steps, "workers": workers}


def attempts_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Every worker's last start: what a later supervisor needs to find it again."""
    return {
        worker.member.name: {
            "pid": worker.pid,
            "identity": worker.handle.identity if worker.handle is not None and worker.pid else None,
            "attempt": group.incarnation,
            "restarts": group.restarts,
            "exit_code": worker.exit_code,
            "log": str(worker.log) if worker.log else None,
        }
        for group in groups
        for worker in group.workers
    }


def _worker_status(group: Group, worker: Worker, stats: dict[str, Any]) -> dict[str, Any]:
    session = session_of(stats, worker.member.name, group.incarnation) or {}
    return {
        "name": worker.member.name,
        "kind": group.kind,
        "state": group.state,
        "pid": worker.pid,
        "incarnation": group.incarnation,
        "restarts": group.restarts,
        "exit_code": worker.exit_code,
        "phase": session.get("phase", ""),
        "progress": session.get("progress", 0),
        "heartbeat_age_s": session.get("seen_age_s"),
    }
