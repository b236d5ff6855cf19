"""Plain pyzmq: a ROUTER that keeps the buffers of batches in a dict, and a DEALER that moves them, nothing copied.

Its processes have the allocator's settings of the queue's: what is compared are not glibc's defaults.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import zmq

from benchmarks.harness import in_process
from benchmarks.queue.workload import BATCH, BATCHES, PASSES, batch, buffers_of
from xtoken_core.data_plane.allocator import CLIENT_KEEPS, set_allocator
from xtoken_services.queue.memory import one_heap


def serve(url: str) -> None:
    """Keep and give back buffers by number, until ended."""
    one_heap()
    kept: dict[bytes, list[zmq.Frame]] = {}
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(url)
    while True:
        peer, kind, number, *buffers = socket.recv_multipart(copy=False)
        if kind.bytes == b"put":
            kept[number.bytes] = buffers
            socket.send_multipart([peer, number], copy=False)
        elif kind.bytes == b"drop":
            kept.clear()
            socket.send_multipart([peer, number], copy=False)
        elif kind.bytes == b"get":
            socket.send_multipart([peer, number, *kept[number.bytes]], copy=False)
        else:
            socket.send_multipart([peer, number, *buffers], copy=False)


@contextmanager
def server(url: str) -> Iterator[None]:
    """Start the ROUTER in a process of its own."""
    process = get_context("spawn").Process(target=serve, args=(url,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def connect(url: str) -> zmq.Socket[bytes]:
    """Return a DEALER that has been answered once."""
    set_allocator(keep=CLIENT_KEEPS)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(url)
    round_trip(socket, [b"echo", b"0"])
    return socket


def round_trip(socket: zmq.Socket[bytes], frames: list[Any]) -> float:
    """Measure the seconds from a request to its whole reply."""
    start = time.perf_counter()
    socket.send_multipart(frames, copy=False)
    socket.recv_multipart(copy=False)
    return time.perf_counter() - start


def move(url: str, what: str, in_flight: int) -> dict[str, Any]:
    """Measure samples per second put or got, with so many requests in flight; all is put, dropped, and put again."""
    socket = connect(url)
    if what == "put":
        first = moved(socket, what, in_flight)
        round_trip(socket, [b"drop", b"0"])
        return {"put_at_first": first, "put": moved(socket, what, in_flight)}
    return {what: moved(socket, what, in_flight)}


def moved(socket: zmq.Socket[bytes], what: str, in_flight: int) -> float:
    """Measure samples per second of one way."""
    buffers, batches = (buffers_of(batch()), BATCHES) if what == "put" else ([], PASSES * BATCHES)
    start = time.perf_counter()
    for number in range(batches + in_flight):
        if number >= in_flight:
            socket.recv_multipart(copy=False)
        if number < batches:
            socket.send_multipart([what.encode(), b"%d" % (number % BATCHES), *buffers], copy=False)
    return BATCH * batches / (time.perf_counter() - start)


def measure(url: str, in_flight: int) -> dict[str, float]:
    """Put, then get, each from a process of its own."""
    with server(url):
        return {**in_process(move, url, "put", in_flight), **in_process(move, url, "get", in_flight)}
