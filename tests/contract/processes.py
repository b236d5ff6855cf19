"""A real queue process for the tests: `xtoken queue` as a user starts it."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_services.queue.metrics import Metrics
from xtoken_services.queue.server import Server

ROOT = Path(__file__).parents[2]
UP_S = 30.0


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def most_bytes(process: int) -> int:
    """The largest resident memory that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def documented_bytes(limit: int) -> int:
    """The memory that docs/operations.md states for a queue with this limit."""
    return int(2.6 * limit) + (400 << 20)


def start_queue(
    address: Address, *arguments: str, stderr: IO[bytes] | None = None, preexec_fn: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """Start a queue at an address, its log going to `stderr`; returns once it answers."""
    command = [sys.executable, "-m", "xtoken_services.cli", "queue", "--bind", address.url, *arguments]
    if address.token_file is not None:
        command += ["--token-file", str(address.token_file)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, preexec_fn=preexec_fn)
    deadline = time.monotonic() + UP_S
    ready = address.ipc_path or address.token_file
    while ready is not None and not ready.exists() and time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the queue ended with status {process.returncode}")
        time.sleep(0.02)
    client = TaskClient(ZmqTransport(address, patience_s=UP_S))
    try:
        client.hello("probe", "probe", incarnation=time.time_ns())
        client.bye()
    finally:
        client.close()
    return process


@contextmanager
def queue_process(address: Address, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A queue while the context lasts; it must end by itself when asked to."""
    process = start_queue(address, *arguments)
    try:
        yield process
    finally:
        process.terminate()
        try:
            status = process.wait(UP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert status == 0, f"the queue ended with status {status}"


@contextmanager
def queue_thread(address: Address, *, memory_limit: int, metrics_port: int | None = None) -> Iterator[Server]:
    """The same server on a thread of this process: quick to start."""
    metrics = None if metrics_port is None else Metrics(metrics_port)
    engine = Engine(memory_limit=memory_limit, clock=time.monotonic, opens=any_partition)
    server = Server(engine, address, metrics=metrics)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(UP_S)


def ipc_address(directory: Path) -> Address:
    """An ipc address in a private directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    return Address.parse(f"ipc://{directory}/q")


def tcp_address(directory: Path) -> Address:
    """A loopback address with a token file that the queue makes."""
    return Address.parse(f"tcp://127.0.0.1:{free_port()}", directory / "token")
