"""A supervisor's end of the socket to a fork server, see `xtoken_services.supervisor.fork_server`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xtoken_core.errors import XtokenError
from xtoken_services.common.processes.supervised import MARK, PYTHON
from xtoken_services.supervisor.environment import SECRETS, THREADS, worker_environment
from xtoken_services.supervisor.fork_server import MARK_ROOM, MESSAGE_LIMIT
from xtoken_services.supervisor.launchers.base import STATUS_FILE

if TYPE_CHECKING:  # what starts a server imports little: the server's imports are what a start waits for
    from xtoken_core.config.spec import RunSpec

SWITCH = "XTOKEN_FORK"
"""Variable that, set to 0, has every worker started as a program of its own."""
PRELOADED = (
    "xtoken_services.cli.app",
    "xtoken_services.collator.main",
    "xtoken_services.rollout.main",
    "xtoken_services.teacher.main",
    "xtoken_services.trainer.main",
)
READY_LIMIT_S = 600.0
ANSWER_LIMIT_S = 30.0
QUEUE = ("xtoken_services.cli", "queue")
NOT_READ_AT_IMPORT = {
    MARK,
    STATUS_FILE,
    THREADS,
    "OMP_WAIT_POLICY",
    "RAYON_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    *SECRETS,
}
"""Variables in which a worker may differ from the server; one that differs in others is started as a program."""
OWN = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The server asks for GPUs without opening one, and numpy starts no threads in it."""


class ForkServer:
    """A process with a worker's imports, from which workers are forked; used by one thread.

    It is an accelerator only: once it has failed, `start` returns None and processes are started as programs.

    Args:
        environment: Environment of the workers, apart from `NOT_READ_AT_IMPORT`.
        preload: Modules to import.
    """

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self._environment = dict(environment)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*PYTHON, "xtoken_services.supervisor.fork_server", str(number), *preload, "." * MARK_ROOM],
                pass_fds=[number],
                env=self._environment | OWN,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._until = time.monotonic() + READY_LIMIT_S
        self._has_imported = False
        self._lost = False
        self._started: list[int] = []
        self._exited: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        """True once processes can be forked, or never will be."""
        self._read()
        if not self._has_imported and not self._lost and time.monotonic() > self._until:
            self.close()
        return self._has_imported or self._lost

    @property
    def lost(self) -> bool:
        """True if the server is gone: what it has forked keeps running, and its exit is not reported."""
        self._read()
        return self._lost

    def start(self, command: Sequence[str], env: Mapping[str, str], output: int) -> int | None:
        """Fork a process that becomes a command.

        Args:
            command: `python -P -m MODULE ARGUMENTS`.
            env: Its whole environment.
            output: Descriptor for its output.

        Returns:
            Its process id; None if it must be started as a program.
        """
        if self.lost or not self._has_imported or not self._can_fork(command, env):
            return None
        request = json.dumps({"program": list(command[len(PYTHON) :]), "env": dict(env)}).encode()
        if len(request) > MESSAGE_LIMIT:
            return None
        try:
            socket.send_fds(self._channel, [request], [output])
        except OSError:
            self.close()
            return None
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while not self._started and not self._lost:
            self._read(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                self.close()
        return self._started.pop() if self._started else None

    def exit_status(self, pid: int) -> int | None:
        """Return the exit status of a forked process, -N for a death by signal N; None while it runs."""
        self._read()
        return self._exited.get(pid)

    def reap(self, pid: int) -> None:
        """Release the number of a process that has exited."""
        del self._exited[pid]
        self._send({"reap": pid})

    def close(self) -> None:
        """End the server; what it has forked keeps running."""
        self._lost = True
        self._channel.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _can_fork(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        module = tuple(command[len(PYTHON) :])
        if tuple(command[: len(PYTHON)]) != PYTHON or module[: len(QUEUE)] == QUEUE:
            return False  # the queue runs without what is imported here
        mine = {name: value for name, value in self._environment.items() if name not in NOT_READ_AT_IMPORT}
        theirs = {name: value for name, value in env.items() if name not in NOT_READ_AT_IMPORT}
        return mine == theirs and len(os.fsencode(env.get(MARK, ""))) <= MARK_ROOM

    def _read(self, wait_s: float = 0.0) -> None:
        """Receive all pending messages, or the first that comes within a time."""
        while not self._lost and select.select([self._channel], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                message = self._channel.recv(MESSAGE_LIMIT)
            except OSError:
                message = b""
            if not message:
                self.close()
                return
            self._note(json.loads(message))

    def _note(self, message: Mapping[str, Any]) -> None:
        if "pid" in message:
            self._started.append(message["pid"])
        elif "exited" in message:
            self._exited[message["exited"]] = message["status"]
        else:
            self._has_imported = True

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # `_read` sees the end of the socket
            self._channel.send(json.dumps(message).encode())


def fork_server_of(environment: Mapping[str, str]) -> ForkServer | None:
    """Start a fork server for workers with this environment, unless `XTOKEN_FORK` is 0."""
    return None if environment.get(SWITCH) == "0" else ForkServer(environment, PRELOADED)


def fork_server_of_run(spec: RunSpec) -> ForkServer | None:
    """Start a fork server for a run's workers; None if one of its files is missing, or it starts them elsewhere."""
    from xtoken_services.common.files.input_files import check_input_files
    from xtoken_services.supervisor.process_spec import heavy_environment

    if spec.workers.launcher != "local":
        return None
    with contextlib.suppress(XtokenError, OSError):  # raised again when the run is resolved
        check_input_files(spec)
        return fork_server_of(worker_environment(heavy_environment(spec)))
    return None
