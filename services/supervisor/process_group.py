"""A group of workers that live and restart together: one collator, one teacher, the queue, or all trainers."""

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

from services.common.supervised import MARK
from services.supervisor import os_process
from services.supervisor.events import Attempt, SupervisorEvents
from services.supervisor.launchers.local import LOST_EXIT, STATUS_FILE, UNKNOWN_EXIT, Handle, Launcher
from services.supervisor.process_spec import STOP_ORDER, Kind, Member
from services.supervisor.restart_policy import RestartPolicy

JOIN_POLL_S = 0.02
LAST_LINE_BYTES = 8192
LEFT = (None, 0, -signal.SIGTERM)
"""How a worker that was asked to leave may end: never started, in order, or by the signal before it has listened."""
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""A process title must not overwrite the environment, by which a worker and its children are found."""


class GroupState(StrEnum):
    """Where a group stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass
class Worker:
    """One process of a group and what is known of its last start."""

    member: Member
    handle: Handle | None = None
    log: Path | None = None
    exit_code: int | None = None
    on_end: Callable[[Worker], None] = lambda worker: None

    @property
    def alive(self) -> bool:
        """Whether its process runs; looks, and remembers how it ended."""
        if self.handle is not None and self.exit_code is None:
            self.exit_code = self.handle.poll()
            if self.exit_code is not None:
                self.on_end(self)
        return self.handle is not None and self.exit_code is None

    @property
    def pid(self) -> int | None:
        """The id of its running process."""
        handle = self.handle
        return handle.pid if handle is not None and self.exit_code is None else None

    def kill(self) -> None:
        """End its process and all that it started, and wait until it is gone."""
        if self.handle is not None:
            self.handle.kill()
        while self.alive:
            time.sleep(JOIN_POLL_S)

    def last_line(self) -> str:
        """The last line of its last log, without the log's own `error:`."""
        return last_line(self.log).removeprefix("error: ") if self.log else ""


@dataclass(frozen=True)
class TakenGroup:
    """Where an earlier supervisor has left a group.

    Attributes:
        incarnation: The number of its last start.
        handles: The processes of that start that had not ended when it was last heard of, by the worker's name.
        waiting: Whether it had failed and was to be started again.
        failures: Those in a row, up to `highest_step`.
    """

    incarnation: int
    handles: Mapping[str, Handle]
    waiting: bool = False
    restarts: int = 0
    failures: int = 0
    highest_step: int = 0


class Group:
    """Members that are started together and, if one fails, restarted together.

    Attributes:
        incarnation: The number of the last start; logs are named by it.
        due: When to start next, by `time.monotonic`, while the group waits.
        restarts: Starts beyond the first in this supervisor's life.
    """

    def __init__(
        self, members: Sequence[Member], policy: RestartPolicy, first_incarnation: int, run_id: str,
        events: SupervisorEvents,
    ) -> None:  # fmt: skip
        self.kind: Kind = members[0].kind
        self.name = members[0].group
        self.workers = [Worker(member, on_end=self._note_end) for member in members]
        self.policy = policy
        self._run_id, self._events = run_id, events
        self.state = GroupState.WAITING
        self.incarnation = first_incarnation - 1
        self.started_at = 0.0
        self.due = 0.0
        self.restarts = 0

    def start(self, launcher: Launcher, logs: Path) -> None:
        """Start every member under the next incarnation number.

        Raises:
            OSError: A process cannot be started.
            LostPlaceError: A machine has gone; those on others may have been started.
        """
        self.incarnation += 1
        self.restarts += self.started_at > 0
        self.state, self.started_at = GroupState.RUNNING, time.monotonic()
        shared = launcher.rendezvous(self.workers[0].member.node) if len(self.workers) > 1 else {}
        for worker in self.workers:
            worker.handle, worker.exit_code = None, None
            worker.log = log_of(logs, worker.member.name, self.incarnation)
        self._events.starting([self._attempt(worker) for worker in self.workers])
        for worker in self.workers:
            assert worker.log is not None
            own = {
                MARK: os_process.mark_of(self._run_id, worker.member.name, self.incarnation),
                STATUS_FILE: str(status_of_log(worker.log)),
            }
            env = _environment({**worker.member.env, **shared, **own})
            command, node = worker.member.command_of(self.incarnation), worker.member.node
            worker.handle = launcher.start(command, env, worker.log, node=node)
            self._events.started(worker.member.name, self.incarnation, worker.handle.identity)
        self.count()

    def take_over(self, handles: Mapping[str, Handle], incarnation: int, restarts: int, logs: Path) -> None:
        """Go on with processes that an earlier supervisor has started, living or not.

        Args:
            handles: By the worker's name; a missing one has ended well.
            incarnation: Which start of the group they are.
            restarts: Starts beyond the first until now.
            logs: The directory of its logs.
        """
        self.incarnation, self.restarts = incarnation, restarts
        self.state, self.started_at = GroupState.RUNNING, time.monotonic()
        for worker in self.workers:
            worker.handle = handles.get(worker.member.name)
            worker.exit_code = None if worker.handle else 0
            worker.log = log_of(logs, worker.member.name, incarnation)

    @property
    def nodes(self) -> set[int]:
        """The node groups that its members belong to."""
        return {worker.member.node for worker in self.workers}

    def count(self) -> None:
        """Write down how often it has failed."""
        self._events.failures_counted(self.name, self.restarts, self.policy.failures, self.policy.highest)

    def settle(self) -> Worker | None:
        """A member that has ended with a failure; the group is `finished` once all have ended well."""
        failed = next((w for w in self.workers if not w.alive and w.exit_code), None)
        if failed is None and not any(worker.alive for worker in self.workers):
            self.state = GroupState.FINISHED
        return failed

    def wait_until(self, due: float) -> None:
        """Be started again, at this time."""
        self.state, self.due = GroupState.WAITING, due

    def _note_end(self, worker: Worker) -> None:
        self._events.exited(worker.member.name, self.incarnation, worker.exit_code)

    def _attempt(self, worker: Worker) -> Attempt:
        assert worker.log is not None
        return Attempt(worker.member.name, worker.member.kind, self.incarnation, worker.log)


def end_in_order(groups: Sequence[Group], grace_s: Callable[[], float]) -> tuple[list[str], list[Worker]]:
    """Let the trainers leave while the others still serve them, then end the others; see `end_all`.

    Args:
        groups: The groups to end.
        grace_s: How long to wait for all of them together.

    Returns:
        The trainers that had to be killed, and the workers that have failed instead of leaving.
    """
    began = time.monotonic()
    trainers = [group for group in groups if group.kind == "trainer"]
    others = sorted((g for g in groups if g.kind != "trainer"), key=lambda group: STOP_ORDER.index(group.kind))
    asked = [w for group in (*trainers, *others) if group.state == GroupState.RUNNING for w in group.workers]
    late = end_all(trainers, grace_s, since=began)
    killed = {worker.member.name for worker in [*late, *end_all(others, grace_s, since=began)]}
    failed = [worker for worker in asked if worker.exit_code not in LEFT and worker.member.name not in killed]
    return [worker.member.name for worker in late], failed


def failed_leaving(worker: Worker, how: str) -> str:
    """One line about a worker that has failed when it was asked to leave."""
    line = worker.last_line()
    return f"{worker.member.name} {how} while the run was stopped{f': {line}' if line else ''}"


def lost_with(trainers: Sequence[str], grace_s: float) -> str:
    """What it means that these had to be killed when a run was stopped, in one line."""
    return (
        f"{', '.join(trainers)} did not leave within {grace_s:g} s (workers.stop_timeout_s): "
        "what was trained since the last checkpoint is lost"
    )


def end_all(groups: Iterable[Group], grace_s: Callable[[], float], *, since: float | None = None) -> list[Worker]:
    """Ask all members of the groups to leave, in the groups' order, then wait for them, then kill what is left.

    Args:
        groups: The groups to end.
        grace_s: How long to wait for them; asked again and again, so that it may become less while waiting.
        since: When the waiting began, by `time.monotonic`; now, if left out.

    Returns:
        Those that were killed.
    """
    workers = [worker for group in groups for worker in group.workers]
    for worker in workers:
        if worker.alive and worker.handle is not None:
            worker.handle.terminate()
    began = time.monotonic() if since is None else since
    while any(worker.alive for worker in workers) and time.monotonic() - began < grace_s():
        time.sleep(JOIN_POLL_S)
    late = [worker for worker in workers if worker.alive]
    for worker in late:
        if worker.handle is not None:
            worker.handle.kill()
    for worker in workers:
        worker.kill()
    return late


def log_of(logs: Path, worker: str, incarnation: int) -> Path:
    """Where one start of a worker logs."""
    return logs / f"{worker}.{incarnation}.log"


def status_of_log(log: Path) -> Path:
    """Where the start of a worker that writes this log leaves its exit status."""
    return log.with_suffix(".status")


def next_incarnation(logs: Path) -> int:
    """A number above every attempt that has a log in this directory."""
    found = (re.search(r"\.(\d+)\.log$", path.name) for path in logs.glob("*.log"))
    return 1 + max((int(match[1]) for match in found if match), default=0)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_LINE_BYTES))
            lines = deque((line for line in file.read().splitlines() if line.strip()), maxlen=1)
    except OSError:
        return ""
    return lines[0].decode("utf-8", "replace").strip() if lines else ""


def describe_exit(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "has not ended"
    if code == LOST_EXIT:
        return "was lost with its machine"
    if code == UNKNOWN_EXIT:
        return "has ended without a word"
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    return inherited | KEEP_ENVIRONMENT | dict(extra)
