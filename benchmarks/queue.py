"""The transfer queue against plain pyzmq: `python -m benchmarks.queue [--out FILE]`.

Batches of 64 samples, four jagged int64 columns of 1024 to 2048 tokens and one bool mask; one producer process, one
consumer process, a loopback socket. Plain pyzmq moves the same buffers between the same number of processes, through a
ROUTER that keeps them in a dict, with as many requests in flight. Rates are samples per second; the medians of several
rounds in one run are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import zmq

from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.zmq_client import ZmqDataPlaneClient
from xtoken_core.wire import Column
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import offsets_from_lengths

BATCH, BATCHES, ROUNDS, SINGLES = 64, 100, 3, 1000
JAGGED = ("input_ids", "teacher_input_ids", "student_chunk_id", "teacher_chunk_id")
ROOT = Path(__file__).parents[1]


def batch(rng: random.Random) -> dict[str, Column]:
    """One batch's columns."""
    columns = {}
    for name in JAGGED:
        lengths = [rng.randint(1024, 2048) for _ in range(BATCH)]
        values = memoryview(bytes(8 * sum(lengths)))
        columns[name] = Column("jagged", "int64", BATCH, (), values, offsets_from_lengths(lengths))
    columns["sample_mask"] = Column("dense", "bool", BATCH, (), memoryview(bytes(BATCH)))
    return columns


def buffers_of(columns: dict[str, Column]) -> list[memoryview]:
    """What travels of them."""
    found = []
    for column in columns.values():
        found += [column.offsets.cast("B")] if column.offsets is not None else []
        found.append(column.values)
    return found


def timed(work: Callable[[Any], dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run a phase in a process of its own, and get what it measured."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_phase, args=(sender, work, arguments))
    process.start()
    found: dict[str, float] = receiver.recv()
    process.join()
    return found


def _phase(sender: Any, work: Callable[..., dict[str, float]], arguments: tuple[Any, ...]) -> None:
    sender.send(work(*arguments))


@contextmanager
def queue_server(url: str, *extra: str) -> Iterator[psutil.Process]:
    """A real queue process."""
    command = [sys.executable, "-m", "services.queue.cli", "--bind", url, "--memory-limit", str(4 << 30), *extra]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def connect(url: str, name: str, *, open_partition: bool = False) -> ZmqDataPlaneClient:
    """A client with a session."""
    client = ZmqDataPlaneClient(Address.parse(url))
    client.hello(name, "bench", incarnation=time.time_ns())
    if open_partition:
        client.open("bench", [m.TaskDef(name="read", requires=["input_ids"])])
    return client


def queue_put(url: str) -> dict[str, float]:
    """Samples per second put."""
    client, columns = connect(url, "producer", open_partition=True), batch(random.Random(1))
    start = time.perf_counter()
    for number in range(BATCHES):
        client.put("bench", range(number * BATCH, (number + 1) * BATCH), columns)
    return {"put": BATCH * BATCHES / (time.perf_counter() - start)}


def queue_get(url: str) -> dict[str, float]:
    """Samples per second read in order, then shuffled, then claimed and acknowledged."""
    client, fields = connect(url, "consumer"), [*JAGGED, "sample_mask"]
    ids = list(range(BATCH * BATCHES))
    found = {}
    for kind in ("get", "get_shuffled"):
        start = time.perf_counter()
        for at in range(0, len(ids), BATCH):
            client.get("bench", ids[at : at + BATCH], fields)
        found[kind] = len(ids) / (time.perf_counter() - start)
        random.Random(2).shuffle(ids)
    start = time.perf_counter()
    for _ in range(BATCHES):
        claimed = client.claim("bench", "read", count=BATCH, fields=fields)
        assert claimed is not None
        client.ack("bench", "read", claimed[0].ids)
    found["claim_ack"] = len(ids) / (time.perf_counter() - start)
    return found


def queue_singles(url: str) -> dict[str, float]:
    """Milliseconds of calls about one sample of one small column."""
    client = connect(url, "singles")
    client.open("singles", [m.TaskDef(name="read", requires=["x"])])
    column = {"x": Column("jagged", "int64", 1, (), memoryview(bytes(64)), offsets_from_lengths([8]))}
    taken: dict[str, list[float]] = {"put": [], "claim": [], "ack": []}
    for number in range(SINGLES):
        steps = (
            ("put", lambda i=number: client.put("singles", [i], column)),
            ("claim", lambda: client.claim("singles", "read", count=1, fields=["x"])),
            ("ack", lambda i=number: client.ack("singles", "read", [i])),
        )
        for name, step in steps:
            start = time.perf_counter()
            step()
            taken[name].append(1000 * (time.perf_counter() - start))
    return {f"{name}_{label}": value for name, times in taken.items() for label, value in _quantiles(times).items()}


def _quantiles(times: list[float]) -> dict[str, float]:
    return {"p50_ms": statistics.median(times), "p99_ms": statistics.quantiles(times, n=100)[98]}


def plain_server(url: str) -> None:
    """A ROUTER that keeps buffers by number, and gives them back."""
    kept: dict[bytes, list[zmq.Frame]] = {}
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(url)
    while True:
        peer, kind, number, *buffers = socket.recv_multipart(copy=False)
        if kind.bytes == b"put":
            kept[number.bytes] = buffers
            socket.send_multipart([peer, b"ok"], copy=False)
        elif kind.bytes == b"get":
            socket.send_multipart([peer, b"ok", *kept[number.bytes]], copy=False)
        else:
            socket.send_multipart([peer, b"ok"], copy=False)


def plain_put_get(url: str, what: str) -> dict[str, float]:
    """Samples per second through plain pyzmq."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(url)
    buffers = buffers_of(batch(random.Random(1))) if what == "put" else []
    start = time.perf_counter()
    for number in range(BATCHES):
        socket.send_multipart([what.encode(), b"%d" % number, *buffers], copy=False)
        socket.recv_multipart(copy=False)
    found = {what: BATCH * BATCHES / (time.perf_counter() - start)}
    times = []
    for _ in range(SINGLES):
        begin = time.perf_counter()
        socket.send_multipart([b"echo", b"0", bytes(64)])
        socket.recv_multipart()
        times.append(1000 * (time.perf_counter() - begin))
    return found | {f"round_trip_{label}": value for label, value in _quantiles(times).items()}


def measure_queue(directory: Path, number: int, *extra: str) -> dict[str, float]:
    """One round of the queue: rates, latencies, memory."""
    url = f"ipc://{directory}/q{number}"
    begin = time.perf_counter()
    with queue_server(url, *extra) as process:
        first = connect(url, "first", open_partition=True)
        first.put("bench", [1 << 40], _one_row())
        start_s = time.perf_counter() - begin
        first.clear("bench")
        idle = process.memory_info().rss
        found = timed(queue_put, url)
        payload = first.stats()["bytes"]
        full = process.memory_info().rss
        found |= timed(queue_get, url) | timed(queue_singles, url)
        after = process.memory_info().rss
        first.close()
    return found | {
        "start_to_first_put_s": start_s, "idle_rss_mib": idle / 2**20, "memory_over_payload": (full - idle) / payload,
        "rss_after_done_mib": after / 2**20,
    }  # fmt: skip


def _one_row() -> dict[str, Column]:
    return {"input_ids": Column("jagged", "int64", 1, (), memoryview(bytes(64)), offsets_from_lengths([8]))}


def measure_plain(directory: Path, number: int) -> dict[str, float]:
    """One round of plain pyzmq."""
    url = f"ipc://{directory}/p{number}"
    server = multiprocessing.get_context("spawn").Process(target=plain_server, args=(url,), daemon=True)
    server.start()
    found = timed(plain_put_get, url, "put") | timed(plain_put_get, url, "get")
    server.terminate()
    server.join()
    return found


def main() -> None:
    """Measure side by side, print and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"queue": [], "queue_journal": [], "plain": []}
    with tempfile.TemporaryDirectory(prefix="xb-") as name:
        directory = Path(name)
        for number in range(ROUNDS):
            rounds["plain"].append(measure_plain(directory, number))
            rounds["queue"].append(measure_queue(directory, number))
            journal = directory / f"journal-{number}"
            rounds["queue_journal"].append(measure_queue(directory, 100 + number, "--journal", str(journal)))
    medians = {
        who: {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}
        for who, found in rounds.items()
    }
    result = {
        "workload": {"batch": BATCH, "batches": BATCHES, "rounds": ROUNDS, "transport": "ipc", "in_flight": 1},
        "machine": {"cpus": psutil.cpu_count(), "processor": platform.processor() or platform.machine()},
        "versions": {name: version(name) for name in ("pyzmq", "msgspec")} | {"python": platform.python_version()},
        "medians": medians,
        "share_of_plain": {key: round(medians["queue"][key] / medians["plain"][key], 3) for key in ("put", "get")},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
