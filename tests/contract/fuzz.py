"""Throws mutated messages at a queue, authenticated and not, beside an honest client that must see no error.

`python -m tests.contract.fuzz --lists 1000000 --seconds 900 --out RESULT.json` is the long run; the default suite has a
short one.
"""

import argparse
import json
import os
import platform
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import zmq

from tests.contract.peers import Place, ints
from tests.contract.processes import queue_process, tcp_address
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.wire import messages as m
from xtoken_services.queue.server import FAILED

GOLDEN = Path(__file__).parents[2] / "proto" / "golden"
SESSION = b"5f1c0a2b3c4d5e6f708192a3b4c5d6e7"
INTERESTING = (0, 1, 0x7F, 0x80, 0x90, 0xA0, 0xC1, 0xC4, 0xC7, 0xCF, 0xD3, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF)
IN_FLIGHT = 32
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01PLAIN" + bytes(47)
HTTP = b"GET / HTTP/1.1\r\n\r\n"
MEMORY = 64 << 20


@dataclass
class Outcome:
    """What happened.

    Attributes:
        sent: Frame lists over authenticated connections.
        answered: Replies to these; some requests wait, and some frame lists are valid ones.
        raw: Connections with bytes that are no handshake.
        honest: Samples that the honest client has put, claimed and acknowledged.
        rss_before, rss_most, rss_after: Bytes of the queue's process; afterwards with every partition cleared.
        held: Bytes of the samples that valid frame lists had put.
    """

    sent: int = 0
    answered: int = 0
    raw: int = 0
    honest: int = 0
    seconds: float = 0.0
    rss_before: int = 0
    rss_most: int = 0
    rss_after: int = 0
    held: int = 0
    errors: list[str] = field(default_factory=list)


def corpus(session: str, partitions: tuple[str, ...]) -> list[list[bytes]]:
    """The golden requests, inside a session and partitions that exist."""
    found = []
    for path in sorted(GOLDEN.glob("*.json")):
        document = json.loads(path.read_text())
        if document["direction"] != "request" or document["header"]["type"] == "bye":
            continue
        header, *buffers = (bytes.fromhex(frame) for frame in document["frames"])
        for partition in partitions:
            assert len(partition) == len("train")
            found.append([header.replace(SESSION, session.encode()).replace(b"train", partition.encode()), *buffers])
    return found


def mutated(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """The frames with one to four things wrong."""
    out = list(frames)
    for _ in range(rng.randint(1, 4)):
        _mutate(rng, out)
    return out


def _mutate(rng: random.Random, frames: list[bytes]) -> None:
    at = rng.randrange(len(frames)) if frames else 0
    kind = rng.randrange(8)
    if not frames or kind == 0:
        frames.insert(at, rng.randbytes(rng.randrange(64)))
    elif kind == 1 and len(frames) > 1:
        del frames[at]
    elif kind == 2:
        frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
    elif kind == 3:
        other = rng.randrange(len(frames))
        frames[at], frames[other] = frames[other], frames[at]
    else:
        body = bytearray(frames[at])
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(body) + 1)
            byte = rng.choice(INTERESTING) if rng.random() < 0.5 else rng.randrange(256)
            if kind == 4 or place == len(body):
                body[place:place] = bytes([byte]) * rng.choice((1, 1, 8))
            else:
                body[place] = byte
        frames[at] = bytes(body)


def authenticated(address: Address, outcome: Outcome, go_on: Callable[[], bool], seed: int) -> None:
    """Mutated requests over a connection that has passed the handshake; every one of them must be answered."""
    rng = random.Random(seed)
    client = TaskClient(ZmqTransport(address))
    client.hello(f"fuzz-{seed}", "trainer", incarnation=time.time_ns(), silence_s=3600)
    client.open("plain", [m.TaskDef(name="train", requires=["input_ids"])])
    run = m.RunDef(
        positions=64, samples_per_step=4, block_size=4, span=16, teachers=1, ranks=1, slots=2, document=b"{}"
    )
    client.open("a_run", run=run)
    requests = corpus(client.session, ("plain", "a_run"))
    context = zmq.Context()
    bare = context.socket(zmq.DEALER)
    bare.sndtimeo = bare.linger = 10_000
    address.authenticate(bare)
    bare.connect(address.url)
    open_requests = 0
    while go_on():
        bare.send_multipart(mutated(rng, rng.choice(requests)))
        outcome.sent += 1
        open_requests += 1
        while bare.poll(0 if open_requests < IN_FLIGHT else 10):
            header = bare.recv_multipart()[0]
            if FAILED.encode() in header:
                outcome.errors.append(str(header))
            outcome.answered += 1
            open_requests -= 1
        if open_requests >= IN_FLIGHT:  # these wait for something that will not come
            open_requests = 0
    bare.close(linger=0)
    context.term()
    client.close()


def unauthenticated(address: Address, outcome: Outcome, go_on: Callable[[], bool], seed: int) -> None:
    """Bytes that are no handshake, or stop in the middle of one."""
    rng = random.Random(seed)
    port = int(address.url.rsplit(":", 1)[1])
    while go_on():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            start = rng.choice(
                (b"", HTTP, GREETING, GREETING[: rng.randrange(64)], GREETING + b"\x04\x26\x05HELLO\x06xtoken\x05")
            )
            raw.sendall(start + rng.randbytes(rng.randrange(300)))
            outcome.raw += 1
        time.sleep(0.002)


def honest(address: Address, outcome: Outcome, go_on: Callable[[], bool]) -> None:
    """A client that wants its samples, and gets them."""
    place = Place("library", address=address)
    peer = place.worker("honest")
    peer.call("open", partition="honest", tasks=[{"name": "a", "requires": ["x"]}])
    number = 0
    while go_on():
        peer.call("put", partition="honest", ids=[number], columns={"x": ints([number])})
        found = peer.call("claim", partition="honest", task="a", count=1, fields=["x"])
        if (found["ids"], found["columns"]["x"]) != ([number], ints([number])):
            outcome.errors.append(f"sample {number} came back as {found}")
        peer.call("ack", partition="honest", task="a", ids=[number])
        number += 1
        outcome.honest += 1
    place.leave()


def fuzz(address: Address, process: psutil.Process, *, go_on: Callable[[Outcome], bool], seed: int) -> Outcome:
    """Fuzz a queue as long as `go_on` says."""
    outcome = Outcome()
    over = threading.Event()

    def more() -> bool:
        return not over.is_set()

    def guard(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            outcome.errors.append(repr(error))

    works: Iterator[Callable[[], None]] = iter(
        (
            lambda: authenticated(address, outcome, more, seed),
            lambda: unauthenticated(address, outcome, more, seed + 1),
            lambda: honest(address, outcome, more),
        )
    )
    threads = [threading.Thread(target=guard, args=(work,)) for work in works]
    begun, outcome.rss_before = time.monotonic(), process.memory_info().rss
    for thread in threads:
        thread.start()
    while go_on(outcome) and not outcome.errors and process.status() != psutil.STATUS_ZOMBIE:
        outcome.rss_most = max(outcome.rss_most, process.memory_info().rss)
        time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join(60)
    outcome.seconds = time.monotonic() - begun
    if not outcome.errors:
        guard(lambda: clear_all(address, outcome))
        time.sleep(1.0)
        outcome.rss_after = process.memory_info().rss
    return outcome


def clear_all(address: Address, outcome: Outcome) -> None:
    """Let everything go that the frame lists have put."""
    with TaskClient(ZmqTransport(address)) as client:
        client.hello("sweeper", "sweeper", incarnation=time.time_ns())
        shown = client.stats()
        outcome.held = shown["bytes"]
        for name, part in shown["partitions"].items():
            if "run" not in part:
                client.clear(name)


def grew_too_much(outcome: Outcome) -> bool:
    """Whether the process holds more than it began with and what the queue may hold."""
    return max(outcome.rss_most - 2 * MEMORY, outcome.rss_after - MEMORY // 4) > outcome.rss_before


def main() -> int:
    """Run against a queue of its own; 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(description="Fuzz a queue of its own.")
    parser.add_argument(
        "--lists", type=int, default=1_000_000, help="frame lists to send over authenticated connections"
    )
    parser.add_argument("--seconds", type=float, default=900.0, help="stop by then, however many were sent")
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xq-") as name:
        address = tcp_address(Path(name))
        with queue_process(address, "--memory-limit", str(MEMORY)) as process:
            end, seed = time.monotonic() + options.seconds, time.time_ns()
            outcome = fuzz(
                address,
                psutil.Process(process.pid),
                go_on=lambda o: o.sent < options.lists and time.monotonic() < end,
                seed=seed,
            )
            alive = process.poll() is None
    failed = bool(outcome.errors) or grew_too_much(outcome) or not alive
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()},
        "settings": {"lists": options.lists, "seconds": options.seconds, "memory_limit": MEMORY, "seed": seed},
        "outcome": asdict(outcome),
        "passed": not failed,
    }
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
