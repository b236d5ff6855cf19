"""How a process of a run is started, signalled and found again: an interface, and its form for this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from services.supervisor import os_process
from services.supervisor.orphan_reaper import APART
from services.supervisor.os_process import Identity
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import XtokenError

UNKNOWN_EXIT = 255
"""The status of a process that ended without leaving one, while nobody watched it who could have been told."""
STATUS_FILE = "XTOKEN_STATUS_FILE"
"""The variable that tells a worker where to leave its exit status: only a parent is told it by the kernel."""
LOOPBACK = "127.0.0.1"
LOST_EXIT = 256
"""The status of a process whose machine has gone: none that a process can leave."""


class LostPlaceError(XtokenError):
    """The machine on which something was to be started has gone: another may take its place."""


class Handle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Its process id, on the machine where it runs."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What its launcher finds it again by, as plain values."""
        ...

    def poll(self) -> int | None:
        """Its exit status, -N for a death by signal N, `UNKNOWN_EXIT` if it left none; None while it lives."""
        ...

    def terminate(self) -> None:
        """Ask it to leave in order."""
        ...

    def kill(self) -> None:
        """End it and everything that it started, at once."""
        ...


class Launcher(Protocol):
    """Starts processes somewhere, and finds again what an earlier one of its kind has started.

    A node is the number of one of the run's node groups; a launcher gives each a machine.
    """

    def ready(self, node: int) -> bool:
        """Whether processes of a node group can be started now; never waits.

        Raises:
            XtokenError: They never will.
        """
        ...

    def where(self, node: int) -> str:
        """Which machine a node group is on, in words; empty if that goes without saying."""
        ...

    def queue(self, node: int, planned: Address) -> Address | None:
        """Where a node group's queue is reached from here: as planned, but for what only its machine decides.

        None while it has no machine.
        """
        ...

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, node: int = 0) -> Handle:
        """Start a command with exactly this environment, its output going to a file.

        `env` has the attempt's mark (`supervised.MARK`), unique among all, and the file for its status (`STATUS_FILE`).

        Raises:
            OSError: It cannot be started.
            LostPlaceError: Not at present.
        """
        ...

    def find(self, identity: dict[str, Any] | None, mark: str, status: Path, *, node: int = 0) -> Handle:
        """A process that was started before, living or not.

        Args:
            identity: What its handle said it is found by; None if that was never written down.
            mark: Its mark.
            status: Where it leaves its status.
            node: Its node group.
        """
        ...

    def rendezvous(self, node: int = 0) -> Mapping[str, str]:
        """What the ranks of a trainer need in their environment to meet there: `MASTER_ADDR`, `MASTER_PORT`.

        Raises:
            LostPlaceError: Not at present.
        """
        ...

    def sweep(self, prefix: str) -> None:
        """End, at once, everything that carries a mark beginning like this."""
        ...

    def close(self) -> None:
        """Nothing will be started any more; what was started without being tied to this process lives on."""
        ...


class LocalHandle:
    """A process of this machine, leader of a session and process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], guard: Guard | None) -> None:
        self._process = process
        self._guard = guard
        identity = os_process.identify(process.pid)
        self._identity = identity.document() if identity else {}
        if guard is not None:
            guard.watch(process.pid)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's as well."""
        return self._process.pid

    @property
    def identity(self) -> dict[str, Any]:
        """Pid, time of start, machine's start and PID namespace."""
        return self._identity

    def poll(self) -> int | None:
        """Its exit status; what it leaves running in its group is killed before it is reaped."""
        if self._process.returncode is None and self._has_exited():
            self._kill_group()
            self._process.wait()
            if self._guard is not None:
                self._guard.forget(self.pid)
        return self._process.returncode

    def terminate(self) -> None:
        """SIGTERM to the process itself: how its children end is its own business."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to its group and to all its descendants, also those that left the group."""
        if self.poll() is not None:
            return
        descendants = os_process.descendants(self.pid)
        self._kill_group()
        os_process.kill(descendants)

    def _has_exited(self) -> bool:
        # Not reaped yet: until then nobody else can get this process or group id.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        os_process.kill_group(self.pid)


class FoundHandle:
    """A process of this machine that another process has started: watched by a pidfd, found by pid and time of start.

    Args:
        identity: Which process; None if it was gone when it was looked for.
        mark: What its environment and its children's say.
        status: The file in which it leaves its exit status.
    """

    def __init__(self, identity: Identity | None, mark: str, status: Path) -> None:
        self._pidfd = os_process.open_handle(identity) if identity is not None else None
        self._process = identity
        self._mark, self._status = mark, status
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 if it never had one that is known."""
        return self._process.pid if self._process else 0

    @property
    def identity(self) -> dict[str, Any]:
        """As of the handle that started it."""
        return self._process.document() if self._process else {}

    def poll(self) -> int | None:
        """Its exit status, if it left one; what it leaves running is killed."""
        if self._exit_code is None and (self._pidfd is None or select.select([self._pidfd], [], [], 0)[0]):
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
            os_process.kill_marked(self._mark)
            self._exit_code = read_status(self._status)
        return self._exit_code

    def terminate(self) -> None:
        """SIGTERM to the process itself."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to it, to its group, to its descendants and to all that carry its mark."""
        if self.poll() is not None:
            return
        below = os_process.descendants(self.pid)
        # It has not been reaped: the poll above found it alive, so the group's number is still its own.
        os_process.kill_group(self.pid)
        self._send(signal.SIGKILL)
        os_process.kill(below)
        os_process.kill_marked(self._mark)

    def _send(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, number)


def read_status(file: Path) -> int:
    """The exit status that a process has left in a file, `UNKNOWN_EXIT` if it has not."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return UNKNOWN_EXIT


class LocalLauncher:
    """Starts processes on this machine, each in a session of its own.

    Args:
        tied: Should the calling process die in any way, SIGKILL included, everything it started dies with it. Without
            it the processes live on.
        private: Directories to remove in that case.
        apart: The calling process is one that kills its children as it ends: what sees to it is none of them.
    """

    def __init__(self, *, tied: bool = False, private: Sequence[Path] = (), apart: bool = False) -> None:
        self._guard = Guard(private, apart=apart) if tied else None

    def ready(self, node: int) -> bool:
        """This machine is there."""
        return True

    def where(self, node: int) -> str:
        """Here."""
        return ""

    def queue(self, node: int, planned: Address) -> Address | None:
        """As planned."""
        return planned

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, node: int = 0) -> LocalHandle:
        """Start a command.

        Raises:
            OSError: The program or the log's directory is missing.
        """
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        return LocalHandle(process, self._guard)

    def find(self, identity: dict[str, Any] | None, mark: str, status: Path, *, node: int = 0) -> FoundHandle:
        """A process that an earlier launcher on this machine has started, living or not."""
        process = Identity.of_document(identity) if identity else None
        if process is None:
            # Its starter was killed before it could write its number down.
            candidates = sorted((found for found, _ in os_process.marked(mark)), key=lambda found: found.ticks)
            process = next(iter(candidates), None)
        return FoundHandle(process, mark, status)

    def rendezvous(self, node: int = 0) -> Mapping[str, str]:
        """A free port of this machine."""
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port(LOOPBACK))}

    def sweep(self, prefix: str) -> None:
        """SIGKILL to every process of this user with such a mark, wherever it has moved in the tree of processes."""
        os_process.kill_marked(prefix)

    def close(self) -> None:
        """Send the guard home."""
        if self._guard is not None:
            self._guard.close()


def free_port(host: str) -> int:
    """A tcp port that nobody uses at an address of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Guard:
    """The supervisor's end of the pipe to an orphan reaper, see `services.supervisor.orphan_reaper`."""

    def __init__(self, private: Sequence[Path], *, apart: bool = False) -> None:
        program = [sys.executable, "-P", "-m", "services.supervisor.orphan_reaper"]
        self._process = subprocess.Popen(
            [*program, *([APART] if apart else ()), *map(str, private)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._pipe: IO[str] = self._process.stdin
        if apart:  # until then it is still a child of ours
            self._process.wait()

    def watch(self, pid: int) -> None:
        """End this process's group should ours die."""
        self._say(f"watch {pid}")

    def forget(self, pid: int) -> None:
        """This process has ended."""
        self._say(f"forget {pid}")

    def close(self) -> None:
        """Let the guard go; there is nothing left for it to end."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line + "\n")
            self._pipe.flush()
