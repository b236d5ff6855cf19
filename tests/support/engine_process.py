"""A server of the tests as a process at a fixed port, which is started again whenever it has ended.

`python -m tests.support.engine_process KIND MODEL PORT [END]` writes the process id of every server on a line. KIND is
`generating` (with END, the token that ends a text) or `scoring`.
"""

import ctypes
import importlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.forks import PR_SET_PDEATHSIG, ROOT


@contextmanager
def server_process(kind: str, model: Path, end: int = -1) -> Iterator[tuple[str, list[int]]]:
    """Run a server; yield its address, and the process ids of all servers so far, of which the last one runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.engine_process", kind, str(model), str(port), str(end)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline())]
        reader = threading.Thread(target=lambda: pids.extend(map(int, process.stdout)), daemon=True)  # type: ignore[arg-type]
        reader.start()
        try:
            yield f"http://127.0.0.1:{port}", pids
        finally:
            process.kill()
            reader.join()


def kill_at_random(pids: list[int], seed: int, longest_s: float) -> None:
    """SIGKILL the newest server after a random time, and wait until another one has been started."""
    count = len(pids)
    time.sleep(random.Random(seed).uniform(0.0, longest_s))
    os.kill(pids[-1], signal.SIGKILL)
    while len(pids) == count:
        time.sleep(0.01)


def serve(kind: str, model: str, port: str, end: str = "-1") -> None:
    """Start a server again and again; each is forked from this process, which has imported everything."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the test
    for module in ("tests.support.generating_server", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    while True:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _serve(kind, Path(model), int(port), int(end))
        print(pid, flush=True)
        os.waitpid(pid, 0)


def _serve(kind: str, model: Path, port: int, end: int) -> None:
    """Serve until the process is killed."""
    from tests.support.engine_server import ModelHandler, serving
    from tests.support.generating_server import GeneratingServer

    if kind == "generating":
        handler = GeneratingServer(model, end)
        handler.created = time.time()
    else:
        handler = ModelHandler(model)
    with suppress(KeyboardInterrupt), serving(handler, port):
        signal.pause()


if __name__ == "__main__":
    serve(*sys.argv[1:])
