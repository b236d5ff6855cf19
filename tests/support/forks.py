"""Workers that start at once: forked from a process that has imported everything and touched no device.

A killed collator, rollout worker, teacher or trainer is back within a second or two instead of ten. The queue is
started as always. `python -m tests.support.forks` is that process: it takes a JSON object a line and answers
with a process id.
"""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.launchers.base import STATUS_FILE, Handle
from xtoken_services.supervisor.launchers.local import AttachedHandle, LocalLauncher
from xtoken_services.supervisor.os_process import MARK

ROOT = Path(__file__).parents[2]
FORKED = ("collator", "rollout", "teacher", "trainer")
PRELOADED = (
    "xtoken_services.cli",
    "xtoken_services.collator.main",
    "xtoken_services.rollout.main",
    "xtoken_services.teacher.main",
    "xtoken_services.trainer.main",
    "transformers.models.llama.modeling_llama",
)
PR_SET_PDEATHSIG = 1


class ForkLauncher(LocalLauncher):
    """A launcher whose workers but the queue are forked; everything it has started dies with it."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self._lock = threading.Lock()
        self._template = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )  # fmt: skip
        self._answer()

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, **place: Any) -> Handle:
        """Start a process by forking, like `LocalLauncher.start`."""
        arguments = list(command[4:])  # python -P -m xtoken_services.cli ...
        if arguments[0] not in FORKED:
            return super().start(command, env, log, **place)
        order = {"arguments": arguments, "env": dict(env), "log": str(log)}
        with self._lock:
            self._template.stdin.write(json.dumps(order) + "\n")
            self._template.stdin.flush()
            pid = int(self._answer())
        return AttachedHandle(os_process.identify(pid), env[MARK], Path(env[STATUS_FILE]))

    def close(self) -> None:
        """End the process that forks, and with it what it has forked."""
        super().close()
        self._template.stdin.close()
        self._template.wait()

    def _answer(self) -> str:
        line = self._template.stdout.readline()
        if not line:
            raise RuntimeError("the process that workers are forked from has ended")
        return line


def serve() -> None:
    """Import, then fork a worker per line."""
    for module in PRELOADED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no parent waits: a worker leaves its status in a file
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(**order)
        print(pid, flush=True)


def _become(arguments: list[str], env: dict[str, str], log: str) -> None:
    """Become a worker as `python -m xtoken_services.cli ARGUMENTS` would be; does not return."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["xtoken", *arguments]
        importlib.import_module("xtoken_services.cli").main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
