"""Processes of this machine: named for good by pid and time of start, and found again by others than their parent."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped] # its types are a package of their own, which is not installed

from services.common.supervised import MARK

PROC = Path("/proc")
START_FIELD = 19
"""Where `/proc/PID/stat` has the time of start, counted after the command's closing parenthesis."""
DEAD_STATES = "ZXx"


@dataclass(frozen=True)
class Identity:
    """A process, told apart from every later one with its number.

    Attributes:
        ticks: When the kernel started it, in clock ticks since the machine's start.
        boot: Which start of the machine that was.
        namespace: The PID namespace that its number belongs to.
    """

    pid: int
    ticks: int
    boot: str
    namespace: str

    def document(self) -> dict[str, Any]:
        """For a file or database."""
        return asdict(self)

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> Identity | None:
        """The opposite of `document`; None if it is none."""
        try:
            return cls(**{name: document[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError):
            return None

    @property
    def alive(self) -> bool:
        """Whether it runs: a zombie does not."""
        found = _ticks_and_state(self.pid) if _is_here(self) else None
        return found is not None and found[0] == self.ticks and found[1] not in DEAD_STATES


def mark_of(run_id: str, worker: str, incarnation: int) -> str:
    """Return the mark that one start of a worker, and all its children, carry in their environment."""
    return f"{run_id}/{worker}/{incarnation}/"


def identify(pid: int) -> Identity | None:
    """A process by its number; None if there is none."""
    found = _ticks_and_state(pid)
    return Identity(pid, found[0], _boot(), _namespace()) if found else None


def open_handle(identity: Identity) -> int | None:
    """A pidfd of the process; None if it is gone.

    The descriptor is opened first and the time of start compared after: whatever it then says is about that process.
    """
    if not _is_here(identity):
        return None
    try:
        handle = os.pidfd_open(identity.pid)
    except OSError:
        return None
    found = _ticks_and_state(identity.pid)
    if found is None or found[0] != identity.ticks:
        os.close(handle)
        return None
    return handle


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one, those that have left its group or session included."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each that still is the one it was."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def kill_group(pid: int) -> None:
    """SIGKILL to a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def marked(prefix: str) -> list[tuple[Identity, str]]:
    """Living processes of this user whose mark begins with `prefix`, each with its mark."""
    found = []
    wanted = f"{MARK}={prefix}".encode()
    for place in PROC.iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            variables = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        mark = next((item for item in variables if item.startswith(wanted)), None)
        identity = identify(int(place.name)) if mark else None
        if mark and identity is not None and identity.alive:
            found.append((identity, mark.decode(errors="replace").partition("=")[2]))
    return found


def kill_marked(prefix: str) -> int:
    """SIGKILL to every process whose mark begins with `prefix`; returns how many there were."""
    found = marked(prefix)
    for identity, _ in found:
        handle = open_handle(identity)
        if handle is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
    return len(found)


def _is_here(identity: Identity) -> bool:
    return (identity.boot, identity.namespace) == (_boot(), _namespace())


def _ticks_and_state(pid: int) -> tuple[int, str] | None:
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[START_FIELD]), fields[0]
    except (OSError, ValueError, IndexError):
        return None


@cache
def _boot() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


@cache
def _namespace() -> str:
    return str((PROC / "self/ns/pid").readlink())
