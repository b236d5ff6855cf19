"""The agent of a node: the one process that Ray starts on a machine. It starts and watches the others there."""

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

from xtoken_core.transports import remove_stale_files as sweep_shared_memory
from xtoken_services.supervisor.launchers.local import ForkedHandle, LocalHandle, LocalLauncher, free_port

POLL_S = 0.02
GIVEN_BY_RAY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that the machine decides, not the environment of the supervisor."""


class NodeAgent:
    """Starts processes on this machine with the local launcher; they die with the agent, however it dies.

    Args:
        address: Address of this machine among the nodes.
        node_id: Ray's id of the node.
        keys: Contents of the queue's key files, by file name.
        required_file: File that every node must see, see `describe`.
    """

    def __init__(self, address: str, node_id: str, keys: Mapping[str, str], required_file: str) -> None:
        with contextlib.suppress(PermissionError):  # Ray starts its workers with a lower priority
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._private = Path(tempfile.mkdtemp(prefix="xtoken-"))
        for name, text in keys.items():
            file = self._private / name
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(text)
        self._launcher = LocalLauncher(tied=True, private=[self._private], detached=True)
        self._handles: dict[str, LocalHandle | ForkedHandle] = {}
        self._facts: dict[str, Any] = {
            "address": address,
            "host": socket.gethostname(),
            "id": node_id,
            "url": f"tcp://{f'[{address}]' if ':' in address else address}:{free_port(address)}",
            "keys": str(self._private),
            "sees_files": Path(required_file).exists(),
        }

    def describe(self) -> dict[str, Any]:
        """Return `address`, `host`, Ray's `id`, the queue's `url`, the directory of `keys`, and `sees_files`."""
        return self._facts

    def start(self, mark: str, command: Sequence[str], env: Mapping[str, str], log: str) -> int | str:
        """Start a process; return its id, or the reason why it cannot be started."""
        given = {name: os.environ[name] for name in GIVEN_BY_RAY if name in os.environ}
        try:
            self._handles[mark] = self._launcher.start(command, {**env, **given}, Path(log))
        except OSError as error:
            return f"{error.filename or command[0]}: {error.strerror}"
        return self._handles[mark].pid

    def statuses(self) -> dict[str, int | None]:
        """Return the exit statuses of all processes it has started, by mark; None for those that run."""
        return {mark: handle.poll() for mark, handle in self._handles.items()}

    def terminate(self, mark: str) -> None:
        """Send SIGTERM to a process."""
        self._handles[mark].terminate()

    def kill(self, mark: str) -> None:
        """Kill a process and everything that it started."""
        self._handles[mark].kill()

    def kill_marked(self, prefix: str) -> None:
        """Kill all processes with such a mark, and remove the shared memory that they leave."""
        self._launcher.kill_marked(prefix)
        self.statuses()
        sweep_shared_memory()

    def free_port(self) -> int:
        """Return a TCP port that is free at its address."""
        return free_port(self._facts["address"])

    def close(self) -> None:
        """Kill what is left and remove the private directory."""
        for handle in self._handles.values():
            handle.kill()
        while any(handle.poll() is None for handle in self._handles.values()):
            time.sleep(POLL_S)
        self._launcher.close()
        shutil.rmtree(self._private, ignore_errors=True)
