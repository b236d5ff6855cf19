"""A process group: processes that are started together and, if one fails, restarted together."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from xtoken_core.regular_files import open_below
from xtoken_services.common.processes.supervised import MARK
from xtoken_services.common.run.machine import oom_kills
from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.environment import worker_environment
from xtoken_services.supervisor.events import Attempt, SupervisorEvents
from xtoken_services.supervisor.launchers.base import NODE_LOST_EXIT, STATUS_FILE, UNKNOWN_EXIT, Handle, Launcher
from xtoken_services.supervisor.process_spec import STOP_ORDER, Kind, ProcessSpec
from xtoken_services.supervisor.run_record import WorkerRecord

JOIN_POLL_S = 0.02
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
LAST_LINE_BYTES = 8192
CLEAN_EXITS = (None, 0, -signal.SIGTERM)
"""Exit codes after a request to stop: never started, graceful, or SIGTERM before the handler was installed."""


class GroupState(StrEnum):
    """State of a process group."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


class RestartPolicy:
    """Restarts with exponential back-off, limited in number until the run makes progress.

    Args:
        limit: Restarts allowed without progress.
        first_delay_s: Seconds before the first restart; each further one waits twice as long.

    Attributes:
        failures: Failures in a row so far.
        highest_step: Highest step that the run has reached so far.
    """

    def __init__(self, limit: int, *, first_delay_s: float = FIRST_DELAY_S) -> None:
        self.limit = limit
        self.failures = 0
        self.highest_step = 0
        self._first_delay_s = first_delay_s

    def record_failure(self, step: int) -> float | None:
        """Count a failure.

        Args:
            step: The run's step at the failure. Only a step beyond `highest_step` is progress: repeating the steps
                since a checkpoint is not.

        Returns:
            Seconds to wait before the restart; None if the limit is exceeded.
        """
        if step > self.highest_step:
            self.highest_step, self.failures = step, 0
        self.failures += 1
        if self.failures > self.limit:
            return None
        return float(min(LONGEST_DELAY_S, self._first_delay_s * 2 ** (self.failures - 1)))


@dataclass
class ManagedProcess:
    """One process of a group, with the handle, log and exit code of its last start."""

    spec: ProcessSpec
    handle: Handle | None = None
    log: Path | None = None
    exit_code: int | None = None
    on_exit: Callable[[ManagedProcess], None] = lambda process: None

    @property
    def alive(self) -> bool:
        """Poll the process and return whether it runs."""
        if self.handle is not None and self.exit_code is None:
            self.exit_code = self.handle.poll()
            if self.exit_code is not None:
                self.on_exit(self)
        return self.handle is not None and self.exit_code is None

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        handle = self.handle
        return handle.pid if handle is not None and self.exit_code is None else None

    def kill(self) -> None:
        """Kill the process and everything that it started, and wait until it is gone."""
        if self.handle is not None:
            self.handle.kill()
        while self.alive:
            time.sleep(JOIN_POLL_S)

    def last_log_line(self) -> str:
        """Return the last line of the log, without the prefix `error:`."""
        return last_log_line(self.log).removeprefix("error: ") if self.log else ""


@dataclass(frozen=True)
class RecoveredGroup:
    """State in which an earlier supervisor has left a group.

    Attributes:
        incarnation: Number of its last start.
        handles: Processes of that start that had not exited when the earlier supervisor last saw them, by name.
        waiting: Whether it had failed and was waiting for a restart.
        restarts: Starts beyond the first so far.
        failures: Failures in a row, up to `highest_step`.
        highest_step: Highest step that the run had reached at a failure.
    """

    incarnation: int
    handles: Mapping[str, Handle]
    waiting: bool = False
    restarts: int = 0
    failures: int = 0
    highest_step: int = 0


class ProcessGroup:
    """Processes that are started together and, if one fails, restarted together.

    Attributes:
        incarnation: Number of the last start; it names the logs.
        oom_kills: The machine's count of processes killed for lack of memory, before the last start.
        due: Time of the next start while the group waits, by `time.monotonic`.
        restarts: Starts beyond the first.

    Args:
        specs: Specs of the processes, all of one kind and one group.
        policy: Limits of restarts.
        first_incarnation: Number of the first start.
        run_id: Prefix of the processes' marks.
        events: Observer of starts and exits.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        policy: RestartPolicy,
        first_incarnation: int,
        run_id: str,
        events: SupervisorEvents,
    ) -> None:
        self.kind: Kind = specs[0].kind
        self.name = specs[0].group
        self.processes = [ManagedProcess(spec, on_exit=self._report_exit) for spec in specs]
        self.policy = policy
        self._run_id, self._events = run_id, events
        self.state = GroupState.WAITING
        self.incarnation = first_incarnation - 1
        self.started_at = 0.0
        self.oom_kills = 0
        self.due = 0.0
        self.restarts = 0

    @property
    def nodes(self) -> set[int]:
        """Numbers of the node groups that its processes belong to."""
        return {process.spec.node for process in self.processes}

    def start(self, launcher: Launcher, logs: Path) -> None:
        """Start every process under the next incarnation number.

        Raises:
            OSError: A process cannot be started.
            NodeLostError: A machine is gone; processes on others may have been started.
        """
        self.incarnation += 1
        self.restarts += self.started_at > 0
        self.state, self.started_at, self.oom_kills = GroupState.RUNNING, time.monotonic(), oom_kills()
        rendezvous = launcher.rendezvous(self.processes[0].spec.node) if len(self.processes) > 1 else {}
        for process in self.processes:
            process.handle, process.exit_code = None, None
            process.log = log_path(logs, process.spec.name, self.incarnation)
        # The attempts are recorded before their processes exist: a supervisor that dies in between leaves processes
        # without a recorded identity, which are recognised by the marks that the attempts imply.
        self._events.starting([self._attempt(process) for process in self.processes])
        for process in self.processes:
            assert process.log is not None
            own = {
                MARK: os_process.mark_of(self._run_id, process.spec.name, self.incarnation),
                STATUS_FILE: str(status_path(process.log)),
            }
            env = worker_environment({**process.spec.env, **rendezvous, **own}, process.spec.secrets)
            command, node = process.spec.command_line(self.incarnation), process.spec.node
            process.handle = launcher.start(command, env, process.log, node=node)
            self._events.started(process.spec.name, self.incarnation, process.handle.identity)
        self.report_failures()

    def attach(self, handles: Mapping[str, Handle], restarts: int, logs: Path) -> None:
        """Continue with the last start of an earlier supervisor, the one before `first_incarnation`.

        Args:
            handles: Its processes by name, running or not; a missing one has exited with 0.
            restarts: Starts beyond the first so far.
            logs: Directory of the logs.
        """
        self.restarts = restarts
        self.state, self.started_at, self.oom_kills = GroupState.RUNNING, time.monotonic(), oom_kills()
        for process in self.processes:
            process.handle = handles.get(process.spec.name)
            process.exit_code = None if process.handle else 0
            process.log = log_path(logs, process.spec.name, self.incarnation)

    def poll(self) -> ManagedProcess | None:
        """Return a process that has failed, if any; set `finished` once all have exited with 0."""
        failed = next((p for p in self.processes if not p.alive and p.exit_code), None)
        if failed is None and not any(process.alive for process in self.processes):
            self.state = GroupState.FINISHED
        return failed

    @property
    def out_of_memory(self) -> ManagedProcess | None:
        """The process that the kernel has killed for lack of memory, by its signal and the counts; None without one."""
        killed = next((process for process in self.processes if process.exit_code == -signal.SIGKILL), None)
        return killed if killed is not None and oom_kills() > self.oom_kills else None

    def restart_at(self, due: float) -> None:
        """Wait for a restart at this time, by `time.monotonic`."""
        self.state, self.due = GroupState.WAITING, due

    def report_failures(self) -> None:
        """Report the restart counters."""
        self._events.failures_counted(self.name, self.restarts, self.policy.failures, self.policy.highest_step)

    def records(self) -> dict[str, WorkerRecord]:
        """Return every process's last start, for `run.json`."""
        return {
            process.spec.name: WorkerRecord(
                pid=process.pid,
                identity=process.handle.identity if process.handle is not None and process.pid else None,
                attempt=self.incarnation,
                restarts=self.restarts,
                exit_code=process.exit_code,
                log=str(process.log) if process.log else None,
            )
            for process in self.processes
        }

    def _report_exit(self, process: ManagedProcess) -> None:
        self._events.exited(process.spec.name, self.incarnation, process.exit_code)

    def _attempt(self, process: ManagedProcess) -> Attempt:
        assert process.log is not None
        return Attempt(process.spec.name, process.spec.kind, self.incarnation, process.log)


def shut_down_gracefully(
    groups: Sequence[ProcessGroup], grace_s: Callable[[], float]
) -> tuple[list[str], list[ManagedProcess]]:
    """Stop the trainers while the other workers still serve them, then stop the others.

    A trainer writes a checkpoint before it exits, for which it needs its collators and teachers alive.

    Args:
        groups: The groups to stop.
        grace_s: Seconds for all of them together, see `stop_groups`.

    Returns:
        Names of the trainers that were killed, and the processes that failed instead of stopping.
    """
    began = time.monotonic()
    trainers = [group for group in groups if group.kind == "trainer"]
    others = sorted((g for g in groups if g.kind != "trainer"), key=lambda group: STOP_ORDER.index(group.kind))
    running = [p for group in (*trainers, *others) if group.state == GroupState.RUNNING for p in group.processes]
    late = stop_groups(trainers, grace_s, since=began)
    killed = {process.spec.name for process in [*late, *stop_groups(others, grace_s, since=began)]}
    failed = [p for p in running if p.exit_code not in CLEAN_EXITS and p.spec.name not in killed]
    return [process.spec.name for process in late], failed


def stop_groups(
    groups: Iterable[ProcessGroup], grace_s: Callable[[], float], *, since: float | None = None
) -> list[ManagedProcess]:
    """Send SIGTERM to all processes, wait for them, and kill those that still run.

    Args:
        groups: The groups to stop, in the order of the signals.
        grace_s: Returns the seconds to wait; polled, so that a second Ctrl+C can shorten the wait.
        since: Start of the wait, by `time.monotonic`; now, if left out.

    Returns:
        The processes that were killed.
    """
    processes = [process for group in groups for process in group.processes]
    for process in processes:
        if process.alive and process.handle is not None:
            process.handle.terminate()
    began = time.monotonic() if since is None else since
    while any(process.alive for process in processes) and time.monotonic() - began < grace_s():
        time.sleep(JOIN_POLL_S)
    late = [process for process in processes if process.alive]
    # All are signalled before the first is waited for, or the last would run on while the first one dies.
    for process in late:
        if process.handle is not None:
            process.handle.kill()
    for process in processes:
        process.kill()
    return late


def failure_during_shutdown(process: ManagedProcess, how: str) -> str:
    """Return the message for a process that failed when it was asked to stop."""
    line = process.last_log_line()
    return f"{process.spec.name} {how} while the run was stopped{f': {line}' if line else ''}"


def lost_progress(trainers: Sequence[str], grace_s: float) -> str:
    """Return the message for trainers that were killed when the run was stopped."""
    return (
        f"{', '.join(trainers)} did not exit within {grace_s:g} s (workers.stop_timeout_s): "
        "progress since the last checkpoint is lost"
    )


def log_path(logs: Path, worker: str, incarnation: int) -> Path:
    """Return the log file of one start of a worker."""
    return logs / f"{worker}.{incarnation}.log"


def status_path(log: Path) -> Path:
    """Return the file in which the worker that writes this log leaves its exit status."""
    return log.with_suffix(".status")


def next_incarnation(logs: Path) -> int:
    """Return a number above every attempt that has a log in this directory."""
    matches = (re.search(r"\.(\d+)\.log$", path.name) for path in logs.glob("*.log"))
    return 1 + max((int(match[1]) for match in matches if match), default=0)


def last_log_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    try:
        with os.fdopen(open_below(log.parent, log.name), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_LINE_BYTES))
            lines = deque((line for line in file.read(LAST_LINE_BYTES).splitlines() if line.strip()), maxlen=1)
    except OSError:
        return ""
    return lines[0].decode("utf-8", "replace").strip() if lines else ""


def describe_exit(code: int | None) -> str:
    """Return an exit status in words."""
    if code is None:
        return "has not exited"
    if code == NODE_LOST_EXIT:
        return "exited: node lost"
    if code == UNKNOWN_EXIT:
        return "exited with unknown status"
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
