"""A group of workers that live and restart together: one collator, one teacher, the queue, or all trainers."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.control.fleet import Kind, Member
from services.control.launcher import Handle, Launcher
from services.control.policy import RestartPolicy

JOIN_POLL_S = 0.02
LAST_LINE_BYTES = 8192
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    created: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its process runs; looks, and remembers how it ended."""
        if self.handle is not None and self.exit_code is None:
            self.exit_code = self.handle.poll()
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


class Group:
    """Members that are started together and, if one fails, restarted together.

    Attributes:
        incarnation: The number of the last start; logs are named by it.
        due: When to start next, by `time.monotonic`, while the group waits.
        restarts: Starts beyond the first in this supervisor's life.
    """

    def __init__(self, members: Sequence[Member], policy: RestartPolicy, first_incarnation: int) -> None:
        self.kind: Kind = members[0].kind
        self.name = members[0].group
        self.workers = [Worker(member) for member in members]
        self.policy = policy
        self.state = GroupState.WAITING
        self.incarnation = first_incarnation - 1
        self.started_at = 0.0
        self.due = 0.0
        self.restarts = 0

    def start(self, launcher: Launcher, logs: Path) -> None:
        """Start every member under the next incarnation number.

        Raises:
            OSError: A process cannot be started.
        """
        self.incarnation += 1
        self.restarts += self.started_at > 0
        self.state, self.started_at = GroupState.RUNNING, time.monotonic()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())} if len(self.workers) > 1 else {}
        for worker in self.workers:
            worker.handle, worker.exit_code = None, None
        for worker in self.workers:
            worker.log = logs / f"{worker.member.name}.{self.incarnation}.log"
            env = _environment({**worker.member.env, **shared})
            worker.handle = launcher.start(worker.member.command_of(self.incarnation), env, worker.log)
            worker.created = worker.handle.created

    def settle(self) -> Worker | None:
        """A member that has ended with a failure; the group is `finished` once all have ended well."""
        failed = next((w for w in self.workers if not w.alive and w.exit_code), None)
        if failed is None and not any(worker.alive for worker in self.workers):
            self.state = GroupState.FINISHED
        return failed

    def wait_until(self, due: float) -> None:
        """Be started again, at this time."""
        self.state, self.due = GroupState.WAITING, due


def end_all(groups: Iterable[Group], grace_s: Callable[[], float]) -> None:
    """Ask all members of the groups to leave, in the groups' order, then wait for them, then kill what is left.

    Args:
        groups: The groups to end.
        grace_s: How long to wait for them; asked again and again, so that it may become less while waiting.
    """
    workers = [worker for group in groups for worker in group.workers]
    for worker in workers:
        if worker.alive and worker.handle is not None:
            worker.handle.terminate()
    began = time.monotonic()
    while any(worker.alive for worker in workers) and time.monotonic() - began < grace_s():
        time.sleep(JOIN_POLL_S)
    for worker in workers:
        if worker.alive and worker.handle is not None:
            worker.handle.kill()
    for worker in workers:
        worker.kill()


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
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    return inherited | dict(extra)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
