"""The process that workers are forked from: `python -P -m xtoken_services.supervisor.fork_server FD MODULE... ROOM`.

It imports the modules once, touches no device, starts no thread, and then forks a process per request, which becomes
what `python -P -m PROGRAM ARGUMENTS` would be. Messages are JSON over a socket of packets, see
`xtoken_services.supervisor.launchers.forks` for the other end:

    to it    {"program": [...], "env": {...}} with the log's descriptor, {"reap": PID}
    from it  {"ready": true}, {"pid": PID}, {"exited": PID, "status": N}

A process that has exited is a zombie until it is reaped by request, so that its number, and that of its process group,
belong to no other process while a supervisor may signal them. At the end of the socket the server exits; its children
keep running.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtoken_services.common.processes.supervised import set_title
from xtoken_services.supervisor.environment import THREADS

MESSAGE_LIMIT = 1 << 16
MARK_ROOM = 256
"""Bytes for a mark, which the last argument keeps free: a title takes no more than the arguments did."""


def main() -> None:
    """Import the modules, then serve; in a forked process, run its program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    set_title("workers")  # before a fork: it looks for the arguments behind the original environment
    gc.disable()  # imports make objects that stay: looking for garbage among them takes a tenth of the time
    for name in sys.argv[2:-1]:
        importlib.import_module(name)
    if not is_safe_to_fork():
        return
    gc.enable()
    gc.freeze()  # a collection in a child would write to every object, and so copy the pages that are shared
    program = Server(channel).serve()
    if program is not None:
        atexit.register(gc.unfreeze)  # extension modules report what is never collected as leaks, in the worker's log
        module, *sys.argv[1:] = program
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def is_safe_to_fork() -> bool:
    """Return True if the imports have started no thread and opened no device; neither survives a fork."""
    torch = sys.modules.get("torch")
    return sum(1 for _ in Path("/proc/self/task").iterdir()) == 1 and (torch is None or not torch.cuda.is_initialized())


class Server:
    """The loop of the parent.

    Args:
        channel: Socket of the process that asks.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}

    def serve(self) -> list[str] | None:
        """Fork a process per request.

        Returns:
            None at the end of the socket; in a forked process its program: a module and its arguments.
        """
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._send({"ready": True})
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._channel:
                    self._report(key.data)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_LIMIT, 1)
                if not message:
                    return None
                request = json.loads(message)
                if "reap" in request:
                    os.waitpid(request["reap"], 0)
                elif self._fork(descriptors[0]) == 0:
                    become(request["env"], descriptors[0])
                    return list(request["program"])

    def _fork(self, log: int) -> int:
        """Fork; return 0 in the child, which has none of the server's descriptors."""
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self._channel.close()
            for pidfd in self._pidfds.values():
                os.close(pidfd)
            return 0
        os.close(log)
        self._pidfds[pid] = os.pidfd_open(pid)
        self._selector.register(self._pidfds[pid], selectors.EVENT_READ, pid)
        self._send({"pid": pid})
        return pid

    def _report(self, pid: int) -> None:
        """Kill what an exited process leaves in its group, and report its status."""
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._send({"exited": pid, "status": status})

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the loop sees the end of the socket
            self._channel.send(json.dumps(message).encode())


def become(env: Mapping[str, str], log: int) -> None:
    """Set session, output and environment of a forked process.

    Args:
        env: The whole environment.
        log: Descriptor for its output; closed.
    """
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    threads = os.environ.get(THREADS)
    os.environ.clear()
    os.environ.update(env)
    set_title("worker")
    torch = sys.modules.get("torch")
    if torch is not None and env.get(THREADS, threads) != threads:  # read by OpenMP when torch was imported
        torch.set_num_threads(int(env[THREADS]))


if __name__ == "__main__":
    main()
