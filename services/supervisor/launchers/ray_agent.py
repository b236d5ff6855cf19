"""A node's agent: the one process of ours that Ray starts on a machine. It starts and watches the others there."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.supervisor.launchers.local import LocalHandle, LocalLauncher, free_port
from xtoken_core.transports import sweep as sweep_shared_memory

POLL_S = 0.02
GIVEN_BY_RAY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""What of a process's environment the machine decides, not whoever starts the run."""


class NodeAgent:
    """Starts processes on this machine as the local launcher does. They end with it, however it ends.

    Args:
        address: This machine's address among the nodes.
        node_id: What Ray calls it.
        keys: Contents of the files with the queue's keys, by their names.
        sees: A file that every node must see.
    """

    def __init__(self, address: str, node_id: str, keys: Mapping[str, str], sees: str) -> None:
        with contextlib.suppress(PermissionError):  # Ray gives its workers way to everybody else
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._private = Path(tempfile.mkdtemp(prefix="xtoken-"))
        for name, text in keys.items():
            file = self._private / name
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(text)
        self._launcher = LocalLauncher(tied=True, private=[self._private], apart=True)
        self._handles: dict[str, LocalHandle] = {}
        self._facts: dict[str, Any] = {
            "address": address,
            "host": socket.gethostname(),
            "id": node_id,
            "url": f"tcp://{f'[{address}]' if ':' in address else address}:{free_port(address)}",
            "keys": str(self._private),
            "sees": Path(sees).exists(),
        }

    def describe(self) -> dict[str, Any]:
        """Where it is: `address`, `host`, Ray's `id`, the queue's `url`, the directory of `keys`, `sees` the files."""
        return self._facts

    def start(self, mark: str, command: Sequence[str], env: Mapping[str, str], log: str) -> int | str:
        """Start a process; returns its id, or why it could not be started."""
        given = {name: os.environ[name] for name in GIVEN_BY_RAY if name in os.environ}
        try:
            self._handles[mark] = self._launcher.start(command, {**env, **given}, Path(log))
        except OSError as error:
            return f"{error.filename or command[0]}: {error.strerror}"
        return self._handles[mark].pid

    def statuses(self) -> dict[str, int | None]:
        """Exit statuses of all that it has started, by their marks; None for the living."""
        return {mark: handle.poll() for mark, handle in self._handles.items()}

    def terminate(self, mark: str) -> None:
        """SIGTERM to a process itself."""
        self._handles[mark].terminate()

    def kill(self, mark: str) -> None:
        """SIGKILL to a process and to everything that it started."""
        self._handles[mark].kill()

    def sweep(self, prefix: str) -> None:
        """SIGKILL to all with such a mark; shared memory that they leave is removed."""
        self._launcher.sweep(prefix)
        self.statuses()
        sweep_shared_memory()

    def free_port(self) -> int:
        """A tcp port that nobody uses at its address."""
        return free_port(self._facts["address"])

    def close(self) -> None:
        """Kill what is left, and leave nothing behind."""
        for handle in self._handles.values():
            handle.kill()
        while any(handle.poll() is None for handle in self._handles.values()):
            time.sleep(POLL_S)
        self._launcher.close()
        shutil.rmtree(self._private, ignore_errors=True)
