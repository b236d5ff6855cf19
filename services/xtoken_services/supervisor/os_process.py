"""Processes of this machine, identified by pid and start time, so that they are recognised by others than a parent."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped] # its types are a package of their own, which is not installed

from xtoken_core.transports.ring import host_identity
from xtoken_services.common.processes.supervised import MARK

PROC = Path("/proc")
START_FIELD = 19
"""Index of the start time in `/proc/PID/stat`, counted after the command's closing parenthesis."""
DEAD_STATES = "ZXx"
MAX_PID = 1 << 22
"""Largest process id of Linux (`PID_MAX_LIMIT`)."""


@dataclass(frozen=True)
class Identity:
    """A process, distinguished from every later one with the same pid.

    Attributes:
        pid: Process id.
        ticks: Start time, in clock ticks since the machine booted.
        boot: Boot id of the machine.
        namespace: PID namespace of the pid.
    """

    pid: int
    ticks: int
    boot: str
    namespace: str

    def to_document(self) -> dict[str, Any]:
        """Return plain values for a file or database."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Identity | None:
        """Return the identity in a document; None if there is none."""
        try:
            identity = cls(**{name: document[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError):
            return None
        # The pid becomes part of a path below /proc and an argument of system calls.
        numbers = type(identity.pid) is int and type(identity.ticks) is int and 0 < identity.pid <= MAX_PID
        return identity if numbers else None

    @property
    def alive(self) -> bool:
        """True if it runs; a zombie does not."""
        current = _ticks_and_state(self.pid) if _is_local(self) else None
        return current is not None and current[0] == self.ticks and current[1] not in DEAD_STATES


def mark_of(run_id: str, worker: str, incarnation: int) -> str:
    """Return the mark that one start of a worker, and all its children, carry in their environment."""
    return f"{run_id}/{worker}/{incarnation}/"


def identify(pid: int) -> Identity | None:
    """Return the identity of the process with this pid; None if there is none."""
    current = _ticks_and_state(pid)
    return Identity(pid, current[0], *host_identity()) if current else None


def open_pidfd(identity: Identity) -> int | None:
    """Return a pidfd of the process; None if it is gone."""
    if not _is_local(identity):
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    # Compared only after opening: the pidfd stays with its process, while the pid may be given to another one between
    # a comparison and the opening.
    current = _ticks_and_state(identity.pid)
    if current is None or current[0] != identity.ticks:
        os.close(pidfd)
        return None
    return pidfd


def descendants(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process, also those that have left its process group or session."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to processes; psutil compares start times, so a reused pid is not signalled."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def kill_group(pid: int) -> None:
    """Send SIGKILL to a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def marked(prefix: str) -> list[tuple[Identity, str]]:
    """Return the running processes of this user whose mark begins with `prefix`, each with its mark."""
    matches = []
    wanted = f"{MARK}={prefix}".encode()
    for directory in PROC.iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            variables = (directory / "environ").read_bytes().split(b"\0")
            title = (directory / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:  # another user's, or gone since the listing
            continue
        if title.startswith(b"xtoken "):
            variables.append(title[title.find(f" {MARK}=".encode()) + 1 :])
        mark = next((item for item in variables if item.startswith(wanted)), None)
        identity = identify(int(directory.name)) if mark else None
        if mark and identity is not None and identity.alive:
            matches.append((identity, mark.decode(errors="replace").partition("=")[2]))
    return matches


def kill_marked(prefix: str) -> None:
    """Send SIGKILL to every process whose mark begins with `prefix`."""
    for identity, _ in marked(prefix):
        pidfd = open_pidfd(identity)
        if pidfd is not None:
            send(pidfd, signal.SIGKILL)
            os.close(pidfd)


def send(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to the process of a pidfd, which may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, number)


def _is_local(identity: Identity) -> bool:
    return (identity.boot, identity.namespace) == host_identity()


def _ticks_and_state(pid: int) -> tuple[int, str] | None:
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[START_FIELD]), fields[0]
    except (OSError, ValueError, IndexError):
        return None
