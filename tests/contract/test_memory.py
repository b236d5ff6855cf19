"""How much memory the queue's process takes for what it holds, and that it gives it back."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.contract.peers import Place
from tests.contract.processes import ipc_address, queue_process
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.queue.store import Store
from xtoken_core.wire import Column, pack_columns, select_rows, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import offsets_from_lengths

BATCH = 64
JAGGED = ("input_ids", "teacher_input_ids", "student_chunk_id", "teacher_chunk_id")


def batch(rng: random.Random, longest: int) -> dict[str, Column]:
    """A batch as a collator makes it: four int64 columns and a mask, rows of `longest / 2` to `longest` tokens."""
    columns = {}
    for name, dtype, unit in (*((name, "int64", 8) for name in JAGGED), ("mask", "bool", 1)):
        lengths = [rng.randint(longest // 2, longest) for _ in range(BATCH)]
        values = memoryview(os.urandom(sum(lengths) * unit)) if dtype == "int64" else memoryview(bytes(sum(lengths)))
        columns[name] = Column("jagged", dtype, BATCH, (), values, offsets_from_lengths(lengths))
    return columns


def settled(process: psutil.Process, below: float) -> int:
    """The process's memory, once it is below so many bytes, or after 10 s."""
    deadline = time.monotonic() + 10
    while (now := process.memory_info().rss) > below and time.monotonic() < deadline:
        time.sleep(0.1)
    return int(now)


def fill(client: TaskClient, samples: int, longest: int) -> int:
    """Put samples; returns their bytes."""
    rng, payload = random.Random(1), 0
    for first in range(0, samples, BATCH):
        columns = batch(rng, longest)
        client.put("p", range(first, first + BATCH), columns, wait_s=30.0)
        payload += sum(column.nbytes for column in columns.values())
    return payload


@pytest.mark.parametrize(
    ("samples", "longest", "share"), [(1600, 1024, 1.25), pytest.param(10_048, 2048, 1.1, marks=[pytest.mark.slow])]
)
def test_memory_follows_what_is_held(
    short_tmp: Path, samples: int, longest: int, share: float, record_property: Callable[[str, object], None]
) -> None:
    address = ipc_address(short_tmp / f"m{samples}")
    with queue_process(address, "--memory-limit", str(1 << 30)) as started:
        process = psutil.Process(started.pid)
        place = Place("library", address=address)
        client: TaskClient = place.worker().client
        client.open("p", [m.TaskDef(name="a", requires=["input_ids"])])
        before = process.memory_info().rss
        payload = fill(client, samples, longest)
        assert client.stats()["bytes"] == payload
        full = settled(process, before + 1.25 * payload)
        while (found := client.claim("p", "a", count=BATCH, fields=["input_ids"])) is not None:
            client.ack("p", "a", found[0].ids)
        assert client.stats()["bytes"] == 0
        after = settled(process, share * before)
        place.leave()
    for name, value in (("before", before), ("payload", payload), ("full", full), ("after", after)):
        record_property(f"{name}_bytes", value)
    assert full - before <= 1.25 * payload
    assert after <= share * before


def address_of(view: memoryview) -> int:
    """Where a buffer's bytes lie."""
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if not view.readonly else _readonly_address(view)


def _readonly_address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def test_a_batch_is_split_into_rows_without_a_copy() -> None:
    columns = batch(random.Random(2), 64)
    heads, buffers = pack_columns(columns)
    frames = [bytes(buffer) for buffer in buffers]
    received = unpack_columns(heads, frames)
    store = Store()
    store.put(range(BATCH), received, range(BATCH))
    first = {id(frame): address_of(memoryview(frame)) for frame in frames}
    for name, column in received.items():
        whole = address_of(column.values)
        assert whole in first.values()
        for row in range(BATCH):
            start, stop = column.row_bounds(row)
            one = store.read([row], [name])[name]
            assert (address_of(one.values), one.values.nbytes) == (whole + start, stop - start)
            assert one.values.obj is column.values.obj
        run = select_rows(column, range(7, 19))
        assert address_of(run.values) == whole + column.row_bounds(7)[0]
        assert store.read(range(7, 19), [name])[name].values.obj is column.values.obj
    assert store.nbytes == sum(column.nbytes for column in columns.values())
