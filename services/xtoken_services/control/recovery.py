"""Recovery of runs after a restart of the control plane: find their processes again, or infer how they ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xtoken_core.errors import ConfigError
from xtoken_services.common.run.status import RunState
from xtoken_services.control.tables import AttemptRow, GroupRow
from xtoken_services.supervisor.launchers.base import Handle, Launcher, read_status
from xtoken_services.supervisor.os_process import mark_of
from xtoken_services.supervisor.process_group import RecoveredGroup, describe_exit, last_log_line, status_path
from xtoken_services.supervisor.process_spec import ProcessSpec
from xtoken_services.supervisor.run_record import SUMMARY, RunResult

RESUME = "resume the run to continue from its last checkpoint"


@dataclass(frozen=True)
class RecoveredRun:
    """State of a run's processes as found after a restart.

    Attributes:
        groups: State of each process group, by name.
        running: Workers whose processes are still running.
        exited: Workers whose processes exited while no control plane was running, with the reason.
    """

    groups: dict[str, RecoveredGroup] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    exited: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Summarise in one line, for the run's history."""
        running = f"recovered: {', '.join(self.running)}" if self.running else "no process is running"
        exited = "; ".join(f"{worker} {reason}" for worker, reason in self.exited.items())
        return f"{running}; meanwhile {exited}" if exited else running


def recover(
    run_id: str,
    members: Sequence[ProcessSpec],
    attempts: Sequence[AttemptRow],
    counts: dict[str, GroupRow],
    launcher: Launcher,
) -> RecoveredRun:
    """Find the processes of a run's last launch.

    A group of which a process failed, or was never started, is killed and restarted as a whole.

    Args:
        run_id: Id of the run.
        members: Process specs of the run.
        attempts: Attempts of its last launch, oldest first.
        counts: Failure counts of its groups.
        launcher: Launcher that started the processes.
    """
    last = {attempt.worker: attempt for attempt in attempts}
    nodes = {member.name: member.node for member in members}
    groups: dict[str, RecoveredGroup] = {}
    running: list[str] = []
    exited: dict[str, str] = {}
    for name in dict.fromkeys(member.group for member in members):
        starts = [last[m.name] for m in members if m.group == name and m.name in last]
        if not starts:
            continue
        handles = {
            start.worker: launcher.attach(
                start.identity,
                mark_of(run_id, start.worker, start.incarnation),
                status_path(Path(start.log)),
                node=nodes[start.worker],
            )
            for start in starts
            if start.ended is None
        }
        running += [worker for worker, handle in handles.items() if handle.poll() is None]
        exited |= {
            worker: describe_exit(handle.poll()) for worker, handle in handles.items() if handle.poll() is not None
        }
        groups[name] = _group(starts, handles, counts.get(name), complete=len(starts) == _size(members, name))
    return RecoveredRun(groups, tuple(running), exited)


def _size(members: Iterable[ProcessSpec], group: str) -> int:
    return sum(member.group == group for member in members)


def _group(
    starts: Sequence[AttemptRow], handles: dict[str, Handle], count: GroupRow | None, *, complete: bool
) -> RecoveredGroup:
    failed = not complete or any(start.ended is not None and start.exit_code != 0 for start in starts)
    if failed:
        for handle in handles.values():
            handle.kill()
    return RecoveredGroup(
        incarnation=max(start.incarnation for start in starts),
        handles={} if failed else handles,
        waiting=failed,
        restarts=count.restarts if count else 0,
        failures=count.failures if count else 0,
        highest_step=count.highest_step if count else 0,
    )


def infer_ending(output: Path, attempts: Sequence[AttemptRow], exited: dict[str, str]) -> RunResult:
    """Infer how a run ended while no control plane was running, from its files and exit statuses.

    Args:
        output: Output directory of the run.
        attempts: Attempts of its last launch, oldest first.
        exited: Reasons why its workers exited, by worker.
    """
    last = {attempt.worker: attempt for attempt in attempts}
    statuses = {
        worker: start.exit_code if start.ended is not None else read_status(status_path(Path(start.log)))
        for worker, start in last.items()
    }
    trainers = [statuses[worker] for worker, start in last.items() if start.kind == "trainer"]
    if trainers and not any(trainers) and (output / SUMMARY).exists():
        return RunResult(RunState.COMPLETED)
    for worker, status in statuses.items():
        if status == ConfigError.exit_code:
            message = last_log_line(Path(last[worker].log)).removeprefix("error: ")
            return RunResult(RunState.FAILED, f"{worker}: {message}", ConfigError.exit_code)
    if not last:
        error = f"the control plane exited before it had started any process: {RESUME}"
        return RunResult(RunState.INTERRUPTED, error, 1)
    reasons = "; ".join(f"{worker} {reason}" for worker, reason in exited.items())
    error = f"all processes exited while no control plane was running{f' ({reasons})' if reasons else ''}: {RESUME}"
    return RunResult(RunState.INTERRUPTED, error, 1)
