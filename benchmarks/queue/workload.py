"""The workload, and helpers that all sides share: batches, rates, quantiles.

A batch is 64 samples: four jagged int64 columns of 1024 to 2048 tokens and one bool mask, 3.2 MB.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from xtoken_core.wire import Column
from xtoken_core.wire.columns import offsets_from_lengths

BATCH, BATCHES = 64, 160
PASSES = 3
"""How often what was put is read: a pass alone would be over in a fifth of a second."""
SHORTEST, LONGEST = 1024, 2048
JAGGED = ("input_ids", "teacher_input_ids", "student_chunk_id", "teacher_chunk_id")
FIELDS = (*JAGGED, "sample_mask")
PATIENCE_S = 120.0


def batch(rows: int = BATCH, seed: int = 1) -> dict[str, Column]:
    """Return the columns of one batch of `rows` samples."""
    rng = random.Random(seed)
    columns = {}
    for name in JAGGED:
        lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(rows)]
        values = memoryview(rng.randbytes(8 * sum(lengths)))
        columns[name] = Column("jagged", "int64", rows, (), values, offsets_from_lengths(lengths))
    columns["sample_mask"] = Column("dense", "bool", rows, (), memoryview(b"\1" * rows))
    return columns


def buffers_of(columns: dict[str, Column]) -> list[memoryview]:
    """Return the buffers that are sent."""
    found = []
    for column in columns.values():
        found += [column.offsets.cast("B")] if column.offsets is not None else []
        found.append(column.values)
    return found


def batch_ids(number: int) -> range:
    """Return the sequential ids of a batch."""
    return range(number * BATCH, (number + 1) * BATCH)


def rate(work: Callable[[int], Any], in_flight: int = 1, batches: int = BATCHES) -> float:
    """Measure samples per second of `work(batch number)` over all batches in order, by `in_flight` threads."""
    numbers = iter(range(batches))
    failures: list[BaseException] = []

    def loop() -> None:
        try:
            for number in numbers:
                work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop) for _ in range(in_flight - 1)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    loop()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - start
    if failures:
        raise failures[0]
    return batches * BATCH / taken


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": 1000 * statistics.median(seconds), "p99_ms": 1000 * cuts[98]}


def memory(process: psutil.Process) -> dict[str, int]:
    """Return resident and proportional set size in bytes."""
    info = process.memory_full_info()
    return {"rss": info.rss, "pss": info.pss}
