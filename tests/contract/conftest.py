"""The queues that the contract suite runs against, each with the clients that can reach it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.peers import Place
from tests.contract.processes import ipc_address, queue_process, queue_thread, tcp_address
from tests.support.memory_queue import MemoryQueue
from xtoken_core.data_plane.address import Address

KINDS = ("memory-library", "ipc-library", "tcp-library", "ipc-reference", "tcp-reference")


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A private directory with a short name: an ipc path has room for 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="xq-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def ipc_queue(short_tmp: Path) -> Iterator[Address]:
    """A queue process at an ipc address."""
    address = ipc_address(short_tmp / "i")
    with queue_process(address):
        yield address


@pytest.fixture(scope="session")
def tcp_queue(short_tmp: Path) -> Iterator[Address]:
    """A queue process at a loopback address, with a token."""
    address = tcp_address(short_tmp)
    with queue_process(address):
        yield address


@pytest.fixture(scope="session")
def memory_queue() -> MemoryQueue:
    """A queue inside this process."""
    return MemoryQueue()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A queue, and the client it is reached by."""
    transport, kind = request.param.split("-")
    if transport == "memory":
        made = Place(kind, memory=request.getfixturevalue("memory_queue"))
    else:
        made = Place(kind, address=request.getfixturevalue(f"{transport}_queue"))
    yield made
    made.leave()


@pytest.fixture(params=KINDS)
def small_place(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Place]:
    """A queue of its own, of 256 KiB."""
    transport, kind = request.param.split("-")
    if transport == "memory":
        made = Place(kind, memory=MemoryQueue(memory_limit=1 << 18))
        yield made
        made.leave()
        return
    directory = Path(tempfile.mkdtemp(dir=short_tmp))
    address = ipc_address(directory) if transport == "ipc" else tcp_address(directory)
    with queue_thread(address, memory_limit=1 << 18):
        made = Place(kind, address=address)
        yield made
        made.leave()
