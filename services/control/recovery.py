"""After a control plane has gone: what has become of the processes of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.control.store import AttemptRow, GroupRow
from services.supervisor.launchers.local import Handle, Launcher, read_status
from services.supervisor.os_process import mark_of
from services.supervisor.process_group import TakenGroup, describe_exit, last_line, status_of_log
from services.supervisor.process_spec import Member
from services.supervisor.run_record import SUMMARY, RunState
from services.supervisor.supervisor import RunResult
from xtoken_core.errors import ConfigError

GO_ON = "resume it to go on from its last checkpoint"


@dataclass(frozen=True)
class RecoveredRun:
    """What was found of a run.

    Attributes:
        groups: Where each group of its processes stands, by name.
        living: The workers that live.
        gone: The workers that have ended since they were last heard of, each with how.
    """

    groups: dict[str, TakenGroup] = field(default_factory=dict)
    living: tuple[str, ...] = ()
    gone: dict[str, str] = field(default_factory=dict)

    def told(self) -> str:
        """One line on it."""
        found = f"found again: {', '.join(self.living)}" if self.living else "none of its processes lives"
        lost = "; ".join(f"{worker} {how}" for worker, how in self.gone.items())
        return f"{found}; in the meantime {lost}" if lost else found


def recover(
    run_id: str, members: Sequence[Member], attempts: Sequence[AttemptRow], counts: dict[str, GroupRow],
    launcher: Launcher,
) -> RecoveredRun:  # fmt: skip
    """Look for every process that a run's last life has started.

    Args:
        run_id: The run.
        members: The run's processes, as they would be started now.
        attempts: Starts of its last life, the oldest first.
        counts: How often its groups had failed.
        launcher: Finds them.
    """
    last = {attempt.worker: attempt for attempt in attempts}
    nodes = {member.name: member.node for member in members}
    groups: dict[str, TakenGroup] = {}
    living: list[str] = []
    gone: dict[str, str] = {}
    for name in dict.fromkeys(member.group for member in members):
        starts = [last[m.name] for m in members if m.group == name and m.name in last]
        if not starts:
            continue
        handles = {
            start.worker: launcher.find(
                start.identity,
                mark_of(run_id, start.worker, start.incarnation),
                status_of_log(Path(start.log)),
                node=nodes[start.worker],
            )
            for start in starts
            if start.ended is None
        }
        living += [worker for worker, handle in handles.items() if handle.poll() is None]
        gone |= {
            worker: describe_exit(handle.poll()) for worker, handle in handles.items() if handle.poll() is not None
        }
        groups[name] = _group(starts, handles, counts.get(name), complete=len(starts) == _size(members, name))
    return RecoveredRun(groups, tuple(living), gone)


def _size(members: Iterable[Member], group: str) -> int:
    return sum(member.group == group for member in members)


def _group(
    starts: Sequence[AttemptRow], handles: dict[str, Handle], count: GroupRow | None, *, complete: bool
) -> TakenGroup:  # fmt: skip
    failed = not complete or any(start.ended is not None and start.exit_code != 0 for start in starts)
    if failed:
        for handle in handles.values():
            handle.kill()
    return TakenGroup(
        incarnation=max(start.incarnation for start in starts),
        handles={} if failed else handles,
        waiting=failed,
        restarts=count.restarts if count else 0,
        failures=count.failures if count else 0,
        highest_step=count.highest_step if count else 0,
    )


def infer_ending(output: Path, attempts: Sequence[AttemptRow], gone: dict[str, str]) -> RunResult:
    """How a run has ended none of whose processes lives, and whose end nobody has seen."""
    last = {attempt.worker: attempt for attempt in attempts}
    statuses = {
        worker: start.exit_code if start.ended is not None else read_status(status_of_log(Path(start.log)))
        for worker, start in last.items()
    }
    trainers = [statuses[worker] for worker, start in last.items() if start.kind == "trainer"]
    if trainers and not any(trainers) and (output / SUMMARY).exists():
        return RunResult(RunState.COMPLETED)
    for worker, status in statuses.items():
        if status == ConfigError.exit_code:
            said = last_line(Path(last[worker].log)).removeprefix("error: ")
            return RunResult(RunState.FAILED, f"{worker}: {said}", ConfigError.exit_code)
    if not last:
        error = f"its control plane ended before it had started anything: {GO_ON}"
        return RunResult(RunState.INTERRUPTED, error, 1)
    how = "; ".join(f"{worker} {end}" for worker, end in gone.items())
    error = f"all its processes ended while no control plane lived{f' ({how})' if how else ''}: {GO_ON}"
    return RunResult(RunState.INTERRUPTED, error, 1)
