"""Status of a run, as shown by clients and stored in `run.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xtoken_services.supervisor.node_groups import NodeGroups
from xtoken_services.supervisor.process_group import ManagedProcess, ProcessGroup
from xtoken_services.supervisor.queue_monitor import find_session


def run_status(groups: Sequence[ProcessGroup], nodes: NodeGroups, steps: int) -> dict[str, Any]:
    """Return a run's progress, queue and workers, as last polled; ages are seconds, sizes bytes."""
    workers = [
        _worker_status(group, process, nodes[process.spec.node].monitor.stats)
        | {"where": nodes.machine(process.spec.node)}
        for group in groups
        for process in group.processes
    ]
    return {**nodes.totals(), "steps": steps, "workers": workers}


def last_attempts(groups: Sequence[ProcessGroup]) -> dict[str, Any]:
    """Return every worker's last start, by which a later supervisor recognises its processes."""
    return {
        process.spec.name: {
            "pid": process.pid,
            "identity": process.handle.identity if process.handle is not None and process.pid else None,
            "attempt": group.incarnation,
            "restarts": group.restarts,
            "exit_code": process.exit_code,
            "log": str(process.log) if process.log else None,
        }
        for group in groups
        for process in group.processes
    }


def _worker_status(group: ProcessGroup, process: ManagedProcess, stats: dict[str, Any]) -> dict[str, Any]:
    session = find_session(stats, process.spec.name, group.incarnation) or {}
    return {
        "name": process.spec.name,
        "kind": group.kind,
        "state": group.state,
        "pid": process.pid,
        "incarnation": group.incarnation,
        "restarts": group.restarts,
        "exit_code": process.exit_code,
        "phase": session.get("phase", ""),
        "activity": session.get("activity", ""),
        "progress": session.get("progress", 0),
        "heartbeat_age_s": session.get("seen_age_s"),
    }
