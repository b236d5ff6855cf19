"""Launcher for this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from xtoken_core.data_plane.address import Address
from xtoken_core.regular_files import append_regular
from xtoken_services.common.processes.supervised import MARK, PYTHON
from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.launchers.base import STATUS_FILE, read_status
from xtoken_services.supervisor.launchers.forks import ForkServer
from xtoken_services.supervisor.orphan_reaper import DETACH
from xtoken_services.supervisor.os_process import Identity

LOOPBACK = "127.0.0.1"


class _GroupLeader(ABC):
    """A process that this one, or its fork server, has started: leader of a session and process group of its own.

    Attributes:
        pid: Process id, which is also the id of its process group.
    """

    def __init__(self, pid: int, reaper: OrphanReaper | None) -> None:
        self.pid, self._reaper = pid, reaper
        self._process = os_process.identify(pid)
        if reaper is not None:
            reaper.watch(pid)

    @property
    def identity(self) -> dict[str, Any]:
        """Process id, start time, boot id and PID namespace."""
        return self._process.to_document() if self._process else {}

    @abstractmethod
    def poll(self) -> int | None:
        """Return the process's exit status; the rest of its process group is killed."""

    def kill(self) -> None:
        """Send SIGKILL to its process group and to all descendants, also those that left the group."""
        if self.poll() is None:
            # Listed first: once their parent is dead, descendants belong to init and cannot be listed any more.
            descendants = os_process.descendants(self.pid)
            os_process.kill_group(self.pid)
            os_process.kill(descendants)

    def _forget(self) -> None:
        if self._reaper is not None:
            self._reaper.forget(self.pid)


class LocalHandle(_GroupLeader):
    """A child process."""

    def __init__(self, process: subprocess.Popen[bytes], reaper: OrphanReaper | None) -> None:
        super().__init__(process.pid, reaper)
        self._child = process

    def poll(self) -> int | None:
        """Return the process's exit status; kill the rest of its process group, then reap it."""
        # WNOWAIT leaves a zombie: until it is reaped, the kernel gives its process and group id to no other process.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self._child.returncode is None and os.waitid(os.P_PID, self.pid, options) is not None:
            os_process.kill_group(self.pid)
            self._child.wait()
            self._forget()
        return self._child.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it ends its children itself."""
        if self.poll() is None:
            self._child.send_signal(signal.SIGTERM)


class AttachedHandle:
    """A process of this machine that is not a child of this one, watched through a pidfd.

    Args:
        identity: The process; None if it was gone when it was looked up.
        mark: Mark in its environment and in its children's.
        status: File in which it leaves its exit status.
    """

    def __init__(self, identity: Identity | None, mark: str, status: Path) -> None:
        self._pidfd = os_process.open_pidfd(identity) if identity is not None else None
        self._process = identity
        self._mark, self._status = mark, status
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 if it is not known."""
        return self._process.pid if self._process else 0

    @property
    def identity(self) -> dict[str, Any]:
        """Identity as of the handle that started it."""
        return self._process.to_document() if self._process else {}

    def poll(self) -> int | None:
        """Return the process's exit status, if it left one; kill the processes that it leaves."""
        if self._exit_code is None and (self._pidfd is None or select.select([self._pidfd], [], [], 0)[0]):
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
            os_process.kill_marked(self._mark)
            self._exit_code = read_status(self._status)
        return self._exit_code

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it, its process group, its descendants and all processes with its mark."""
        if self.poll() is not None:
            return
        descendants = os_process.descendants(self.pid)
        # `poll` has just seen it alive, so the number of its process group has not been given to another one.
        os_process.kill_group(self.pid)
        self._send(signal.SIGKILL)
        os_process.kill(descendants)
        os_process.kill_marked(self._mark)

    def _send(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            os_process.send(self._pidfd, number)


class ForkedHandle(_GroupLeader):
    """A child of the fork server.

    Args:
        server: The fork server.
        pid: Process id, reserved until the process is reaped here.
        mark: Mark in its environment and in its children's.
        status: File in which it leaves its exit status, read if the server is lost.
        reaper: The orphan reaper that watches it.
    """

    def __init__(self, server: ForkServer, pid: int, mark: str, status: Path, reaper: OrphanReaper | None) -> None:
        super().__init__(pid, reaper)
        self._server, self._mark, self._status = server, mark, status
        self._attached: AttachedHandle | None = None
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the process's exit status; the rest of its process group is killed."""
        if self._exit_code is not None:
            return self._exit_code
        status = self._server.exit_status(self.pid)
        if status is not None:
            self._server.reap(self.pid)
        elif self._server.lost:
            self._attached = self._attached or AttachedHandle(self._process, self._mark, self._status)
            status = self._attached.poll()
        self._exit_code = status
        if status is not None:
            self._forget()
        return status

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it ends its children itself."""
        if self.poll() is None and self._attached is not None:
            self._attached.terminate()
        elif self._exit_code is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it and what it has started; see `AttachedHandle` for one whose server is lost."""
        if self.poll() is None and self._attached is not None:
            self._attached.kill()
        else:
            super().kill()


class LocalLauncher:
    """Starts processes on this machine, each in a session of its own.

    Args:
        tied: If this process dies in any way, SIGKILL included, kill everything it started. Without it the processes
            keep running.
        private: Directories to remove in that case.
        detached: Make the orphan reaper no child of this process, for a parent that kills its children as it exits.
        forks: Forks the processes that it can; None: every process is started as a program.
    """

    def __init__(
        self,
        *,
        tied: bool = False,
        private: Sequence[Path] = (),
        detached: bool = False,
        forks: ForkServer | None = None,
    ) -> None:
        self._reaper = OrphanReaper(private, detached=detached) if tied else None
        self._forks = forks

    def ready(self, node: int, kind: str) -> bool:
        """Return True, except for workers while the fork server imports."""
        return kind == "queue" or self._forks is None or self._forks.ready

    def machine(self, node: int) -> str:
        """Return the empty string, for this machine."""
        return ""

    def queue_address(self, node: int, planned: Address) -> Address | None:
        """Return the planned address."""
        return planned

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, *, node: int = 0
    ) -> LocalHandle | ForkedHandle:
        """Start a command.

        Raises:
            OSError: The program or the log's directory is missing, or the log is no regular file.
        """
        with os.fdopen(append_regular(log), "ab") as output:
            if self._forks is not None:
                pid = self._forks.start(command, env, output.fileno())
                if pid is not None:
                    return ForkedHandle(self._forks, pid, env[MARK], Path(env[STATUS_FILE]), self._reaper)
            process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return LocalHandle(process, self._reaper)

    def attach(self, identity: dict[str, Any] | None, mark: str, status: Path, *, node: int = 0) -> AttachedHandle:
        """Return a handle of a process that an earlier launcher on this machine has started, running or not."""
        process = Identity.from_document(identity) if identity else None
        if process is None:
            # The earlier supervisor was killed between starting the process and storing its identity. Children carry
            # the same mark and started later, so the oldest process is the one.
            candidates = sorted((candidate for candidate, _ in os_process.marked(mark)), key=lambda c: c.ticks)
            process = next(iter(candidates), None)
        return AttachedHandle(process, mark, status)

    def rendezvous(self, node: int = 0) -> Mapping[str, str]:
        """Return a free port of this machine."""
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port(LOOPBACK))}

    def kill_marked(self, prefix: str) -> None:
        """Send SIGKILL to every process of this user with such a mark, wherever it is in the process tree."""
        os_process.kill_marked(prefix)

    def close(self) -> None:
        """Stop the orphan reaper."""
        if self._reaper is not None:
            self._reaper.close()


def free_port(host: str) -> int:
    """Return a TCP port that is free at an address of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class OrphanReaper:
    """This process's end of the pipe to an orphan reaper, see `xtoken_services.supervisor.orphan_reaper`.

    Args:
        private: Directories that it removes if this process dies.
        detached: Start it as no child of this process.
    """

    def __init__(self, private: Sequence[Path], *, detached: bool = False) -> None:
        self._process = subprocess.Popen(
            [*PYTHON, "xtoken_services.supervisor.orphan_reaper", *([DETACH] if detached else ()), *map(str, private)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdin is not None
        self._pipe: IO[str] = self._process.stdin
        if detached:  # the child forks the reaper and exits; nothing may be started before that
            self._process.wait()

    def watch(self, pid: int) -> None:
        """Register a process, whose group is killed if the supervisor dies."""
        self._write(f"watch {pid}")

    def forget(self, pid: int) -> None:
        """Report that this process has exited."""
        self._write(f"forget {pid}")

    def close(self) -> None:
        """Stop the reaper, once all processes have been forgotten."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line + "\n")
            self._pipe.flush()
