"""How a process of a run is started and signalled: an interface, and its form for this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from services.control import processes


class Handle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def created(self) -> float | None:
        """When it was started, in seconds since the epoch: with the pid it names the process for good."""
        ...

    def poll(self) -> int | None:
        """Its exit status, -N for a death by signal N; None while it lives."""
        ...

    def terminate(self) -> None:
        """Ask it to leave in order."""
        ...

    def kill(self) -> None:
        """End it and everything that it started, at once."""
        ...


class Launcher(Protocol):
    """Starts processes somewhere."""

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Handle:
        """Start a command with exactly this environment, its output going to a file."""
        ...

    def close(self) -> None:
        """Nothing will be started any more, and everything started has ended."""
        ...


class LocalHandle:
    """A process of this machine, leader of a session and process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], guard: Guard | None) -> None:
        self._process = process
        self._guard = guard
        self._created = processes.created(process.pid)
        if guard is not None:
            guard.watch(process.pid)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's as well."""
        return self._process.pid

    @property
    def created(self) -> float | None:
        """When the kernel started it, in seconds since the epoch."""
        return self._created

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
        descendants = processes.descendants(self.pid)
        self._kill_group()
        processes.kill(descendants)

    def _has_exited(self) -> bool:
        # Not reaped yet: until then nobody else can get this process or group id.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class LocalLauncher:
    """Starts processes on this machine, each in a session of its own.

    Args:
        tied: Should the calling process die in any way, SIGKILL included, everything it started dies with it. Without
            it the processes live on.
        private: Directories to remove in that case.
    """

    def __init__(self, *, tied: bool = False, private: Sequence[Path] = ()) -> None:
        self._guard = Guard(private) if tied else None

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> LocalHandle:
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

    def close(self) -> None:
        """Send the guard home."""
        if self._guard is not None:
            self._guard.close()


class Guard:
    """This side of the process that outlives ours and then ends what we started (`services.control.guard`)."""

    def __init__(self, private: Sequence[Path]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.control.guard", *map(str, private)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._pipe: IO[str] = self._process.stdin

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
