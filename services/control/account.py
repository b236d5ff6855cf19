"""What a supervisor tells of its run: a status for those who watch, attempts and pids for those who come later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.control.groups import Group, Worker
from services.control.observer import Observer, session_of


def status_of(groups: Sequence[Group], observer: Observer, steps: int) -> dict[str, Any]:
    """Where a run stands, as its queue was last seen; ages are seconds, sizes bytes."""
    run, stats = observer.run, observer.stats
    partition = observer.partition
    return {
        "step": run.get("step", 0),
        "steps": steps,
        "skipped": run.get("skipped", 0),
        "dead": partition.get("dead", 0),
        "queue": {
            "samples": partition.get("samples", 0),
            "bytes": stats.get("bytes", 0),
            "memory_limit": stats.get("memory_limit", 0),
            "tasks": partition.get("tasks", {}),
        },
        "workers": [_worker_status(group, worker, stats) for group in groups for worker in group.workers],
    }


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
