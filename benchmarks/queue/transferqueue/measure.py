"""The same workload through the PyPI package TransferQueue: simple storage, two storage units, one node.

    loopback.sh PYTHON measure.py

Runs in an environment made from `requirements.txt`, and prints one JSON document. This process is the producer; the
consumer is a second one. A batch is put by `kv_batch_put` and read, in order, by `kv_batch_get`, one at a time: their
calls block. Every batch goes in under keys of its own. All of a size is put, cleared and put again, which is timed, and
cleared before the next size.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from importlib.metadata import version

START = time.perf_counter()
NODE = "127.0.0.1"
JAGGED = ("input_ids", "teacher_input_ids", "student_chunk_id", "teacher_chunk_id")
SAMPLES, SINGLES = 2560, 60
BATCHES = (64, 256)
"""Samples per batch."""


def batch(rows: int):
    """Return a TensorDict of one batch: four jagged int64 columns of 1024 to 2048 tokens, one bool mask."""
    import torch
    from tensordict import TensorDict

    rng = random.Random(1)
    columns = {}
    for name in JAGGED:
        lengths = [rng.randint(1024, 2048) for _ in range(rows)]
        parts = [torch.randint(0, 1 << 17, (length,)) for length in lengths]
        columns[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    columns["sample_mask"] = torch.ones(rows, dtype=torch.bool)
    return TensorDict(columns, batch_size=[rows])


def keys(size: int, number: int) -> list[str]:
    """Return the keys of a batch."""
    return [f"{size}-{i}" for i in range(number * size, (number + 1) * size)]


def attach(address: str):
    """Start the package in this process."""
    import ray
    import transfer_queue

    ray.init(address=address, _node_ip_address=NODE, log_to_driver=False, logging_level="ERROR")
    transfer_queue.init()
    return transfer_queue


def consumer(address: str, pipe) -> None:
    """Read on request, and reply with the rate; with a size of 1, with the times of single reads."""
    queue = attach(address)
    pipe.send("ready")
    while (size := pipe.recv()) is not None:
        if size == 1:
            times = []
            for number in range(SINGLES):
                begin = time.perf_counter()
                queue.kv_batch_get(keys(1, number), "size1")
                times.append(time.perf_counter() - begin)
            pipe.send(times)
            continue
        begin = time.perf_counter()
        for number in range(SAMPLES // size):
            assert len(queue.kv_batch_get(keys(size, number), f"size{size}")) == size
        pipe.send(SAMPLES / (time.perf_counter() - begin))


def measure() -> dict:
    """Measure rates for each batch size, times of single calls, and the time from the start to the first put."""
    import ray
    import transfer_queue as queue

    context = ray.init(
        address="local", _node_ip_address=NODE, num_cpus=4, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    queue.init()
    queue.kv_batch_put(["first"], "first", batch(1))
    found: dict = {"start_to_first_put_s": time.perf_counter() - START, "batch": {}}
    address = context.address_info["gcs_address"]
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=consumer, args=(address, theirs), daemon=True)
    process.start()
    mine.recv()
    for size in BATCHES:
        columns, every = batch(size), [key for number in range(SAMPLES // size) for key in keys(size, number)]
        rates = []
        for _ in range(2):
            if rates:
                queue.kv_clear(every, f"size{size}")
            begin = time.perf_counter()
            for number in range(SAMPLES // size):
                queue.kv_batch_put(keys(size, number), f"size{size}", columns)
            rates.append(SAMPLES / (time.perf_counter() - begin))
        mine.send(size)
        found["batch"][str(size)] = {"put_at_first": rates[0], "put": rates[1], "get": mine.recv()}
        queue.kv_clear(every, f"size{size}")
    single, times = batch(1), []
    for number in range(SINGLES):
        begin = time.perf_counter()
        queue.kv_batch_put(keys(1, number), "size1", single)
        times.append(time.perf_counter() - begin)
    mine.send(1)
    found["put_p50_ms"], found["get_p50_ms"] = 1000 * statistics.median(times), 1000 * statistics.median(mine.recv())
    mine.send(None)
    process.join()
    names = ("TransferQueue", "ray", "torch", "tensordict", "pyzmq")
    found["versions"] = {"python": platform.python_version()} | {name: version(name) for name in names}
    found["settings"] = {"storage": "SimpleStorage", "storage_units": 2, "samples": SAMPLES, "in_flight": 1}
    return found


def main() -> None:
    """Measure, and print the result as the last line."""
    os.environ["TQ_LOGGING_LEVEL"] = "ERROR"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    print(json.dumps(measure()), flush=True)


if __name__ == "__main__":
    main()
