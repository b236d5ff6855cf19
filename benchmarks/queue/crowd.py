"""1,000 connections from 4 processes on one server, each in a closed loop: put a sample, claim it, acknowledge it.

A wait is the time from a request to its reply; of each client the mean and the longest are reported.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

import zmq

from benchmarks.queue import ours
from benchmarks.queue.latency import small_sample
from benchmarks.queue.workload import PATIENCE_S
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.frames import receive_frames, send_frames
from xtoken_core.wire import messages as m
from xtoken_core.wire import pack_columns

PROCESSES, CONNECTIONS = 4, 250
RUN_S = 10.0


class Connection:
    """One connection, its session, and the seconds that its requests took."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        address.authenticate(self.socket)
        self.socket.connect(address.url)
        self.waits: list[float] = []
        self.session = ""
        self._sent = 0.0


class Client(Connection):
    """A connection and the one request that it has open."""

    heads, buffers = pack_columns(small_sample())

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address, number: int) -> None:
        super().__init__(context, address)
        self.number = number
        self._turn = 0

    def hello(self) -> None:
        """Ask for a session."""
        name = f"client {self.number}"
        hello = m.Hello(
            id="0", versions=[m.VERSION], name=name, role="bench", incarnation=time.time_ns(), silence_s=600
        )
        send_frames(self.socket, m.encode(hello), [])

    def ask(self) -> None:
        """Send the next request of put, claim, ack."""
        call, turn = self._turn % 3, self._turn // 3
        self._turn += 1
        sample = self.number + turn * PROCESSES * CONNECTIONS
        common = {"id": f"c.{self._turn}", "session": self.session, "partition": ours.PARTITION}
        buffers: list[memoryview] = []
        request: m.Request
        if call == 0:
            request, buffers = m.Put(ids=[sample], columns=self.heads, **common), self.buffers
        elif call == 1:
            request = m.Claim(task=ours.TASK, ids=[sample], fields=["input_ids"], **common)
        else:
            request = m.Ack(task=ours.TASK, ids=[sample], **common)
        self._sent = time.perf_counter()
        send_frames(self.socket, m.encode(request), buffers)

    def take(self) -> m.AnyReply:
        """Return the reply to the open request.

        Raises:
            RuntimeError: It was refused.
        """
        reply = m.decode_reply(receive_frames(self.socket)[0].buffer)
        if isinstance(reply, m.Failure):
            raise RuntimeError(f"{reply.code}: {reply.message}")
        if self._turn:
            self.waits.append(time.perf_counter() - self._sent)
        return reply


def crowd(address: Address, process: int, together: Any) -> list[list[float]]:
    """Return the waits of the connections of one process, which starts once the others have their connections too."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients = [Client(context, address, process * CONNECTIONS + i) for i in range(CONNECTIONS)]
    poller = zmq.Poller()
    by_socket = {client.socket: client for client in clients}
    for client in clients:
        client.hello()
        poller.register(client.socket, zmq.POLLIN)
    while any(not client.session for client in clients):
        for socket, _ in poller.poll():
            welcome = by_socket[socket].take()
            assert isinstance(welcome, m.Welcome)
            by_socket[socket].session = welcome.session
    together.wait(PATIENCE_S)
    for client in clients:
        client.ask()
    end = time.perf_counter() + RUN_S
    open_requests = len(clients)
    while open_requests:
        for socket, _ in poller.poll():
            by_socket[socket].take()
            if time.perf_counter() < end:
                by_socket[socket].ask()
            else:
                open_requests -= 1
    context.destroy(linger=0)
    return [client.waits for client in clients]


def measure(address: Address) -> dict[str, Any]:
    """Measure all connections at once."""
    context = multiprocessing.get_context("spawn")
    with ours.server(address), context.Manager() as manager, ProcessPoolExecutor(PROCESSES, context) as pool:
        ours.first_put(address)
        of_each = repeat(address), range(PROCESSES), repeat(manager.Barrier(PROCESSES))
        waits = [client for clients in pool.map(crowd, *of_each) for client in clients]
    every = [wait for client in waits for wait in client]
    means, longest = [statistics.mean(client) for client in waits], [max(client) for client in waits]
    median = statistics.median(means)
    return {
        "connections": len(waits),
        "processes": PROCESSES,
        "answers": len(every),
        "answers_per_s": len(every) / RUN_S,
        "fewest_answers_of_a_client": min(map(len, waits)),
        "median_client_wait_ms": 1000 * median,
        "worst_client_wait_ms": 1000 * max(means),
        "worst_over_median": max(means) / median,
        "longest_wait_ms": 1000 * max(longest),
        "longest_wait_over_median_wait": max(longest) / statistics.median(every),
    }
