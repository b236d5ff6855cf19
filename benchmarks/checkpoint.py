"""Two forms of a checkpoint side by side, in one run: `python -m benchmarks.checkpoint [--megabytes N]`.

`safetensors`: the trainer's own form. `dcp`: `torch.distributed.checkpoint` with its file system writer, the form until
version 3, which pickles. Measured with one rank and with two that hold shards, in alternation: seconds of a write with
fsync and of a read from the page cache, bytes on the disk, memory above the state's own while writing, and the longest
pause of a thread that wakes every millisecond meanwhile, which shows how long a write keeps the interpreter from the
training. The result goes to `benchmarks/results/checkpoint.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.harness import command_line, write_result
from xtoken_services.supervisor.launchers.local import LOOPBACK, free_port
from xtoken_services.trainer.checkpoint_files import build_index, read_index, read_tensors, write_index, write_rank_file
from xtoken_services.trainer.staging import local_part

WIDTH = 1024
ROWS = 4096
FORMS = ("safetensors", "dcp")
State = dict[str, Tensor]


def make_state(megabytes: int, ranks: int) -> State:
    """Return float32 matrices of 16 MiB with a vector each, random; shards of them if there are several ranks."""
    torch.manual_seed(1)
    state: State = {}
    for number in range(megabytes * (1 << 20) // (4 * WIDTH * ROWS)):
        state[f"layer.{number}.weight"] = torch.randn(ROWS, WIDTH)
        state[f"layer.{number}.norm"] = torch.randn(WIDTH)
    if ranks == 1:
        return state
    mesh = init_device_mesh("cpu", (ranks,))
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}


def write(form: str, directory: Path, state: State, rank: int, ranks: int) -> None:
    """Write a state; all ranks call."""
    if form == "safetensors":
        index = build_index(state, ranks)
        write_rank_file(directory, index, state, rank)
        if rank == 0:
            write_index(directory, index)
    else:
        dcp_save(dict(state), storage_writer=FileSystemWriter(directory, sync_files=True), no_dist=ranks == 1)


def read(form: str, directory: Path, state: State, rank: int, ranks: int) -> None:
    """Read a state in place; all ranks call."""
    if form == "safetensors":
        read_tensors(directory, read_index(directory), state, rank, ranks)
    else:
        dcp_load(dict(state), storage_reader=FileSystemReader(directory), no_dist=ranks == 1)


class Pauses:
    """A thread's longest pause beyond the millisecond that it sleeps, and the process's peak memory, during a block."""

    def __enter__(self) -> Pauses:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = memory("VmRSS")
        self._stop = threading.Event()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.memory_bytes = memory("VmHWM") - self._before
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest = max(self.longest, now - last - 0.001)
            last = now


def memory(field: str) -> int:
    """Return a field of `/proc/self/status` in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def measure(directory: Path, megabytes: int, repeats: int, rank: int, ranks: int) -> dict[str, dict[str, list[float]]]:
    """Return the samples of every form, the forms in alternation."""
    state = make_state(megabytes, ranks)
    samples: dict[str, dict[str, list[float]]] = {form: {} for form in FORMS}
    for repeat in range(repeats + 1):  # the first one warms up
        for form in FORMS:
            target = directory / f"{form}-{repeat}"
            if rank == 0:
                target.mkdir(mode=0o700)
            together(ranks)
            with Pauses() as writing:
                write(form, target, state, rank, ranks)
                together(ranks)
            kept = {name: local_part(value).clone() for name, value in state.items()}
            for value in state.values():
                local_part(value).zero_()
            together(ranks)
            began = time.perf_counter()
            read(form, target, state, rank, ranks)
            together(ranks)
            seconds = time.perf_counter() - began
            assert all(torch.equal(local_part(value), kept[name]) for name, value in state.items()), form
            if repeat:
                row = {
                    "write_seconds": writing.seconds,
                    "read_seconds": seconds,
                    "longest_pause_ms": writing.longest * 1000,
                    "memory_above_state_mib": writing.memory_bytes / 2**20,
                    "bytes": sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
                }
                for name, value in row.items():
                    samples[form].setdefault(name, []).append(value)
            together(ranks)
            if rank == 0:
                shutil.rmtree(target)
    return samples


def together(ranks: int) -> None:
    """Wait for all ranks."""
    if ranks > 1:
        dist.barrier()


def one_rank(directory: str, arguments: argparse.Namespace, port: int, rank: int, ranks: int) -> Any:
    """Return the samples of one of several ranks."""
    if ranks > 1:
        dist.init_process_group("gloo", f"tcp://{LOOPBACK}:{port}", rank=rank, world_size=ranks)
    samples = measure(Path(directory), arguments.megabytes, arguments.repeats, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()
    return samples


def start(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Start the ranks, and return the medians and extremes of what they measure."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    place = tempfile.TemporaryDirectory(dir=arguments.directory)
    with place as directory, ProcessPoolExecutor(ranks, get_context("spawn")) as pool:
        common, port = (directory, arguments), free_port(LOOPBACK)
        parts = [pool.submit(one_rank, *common, port, rank, ranks) for rank in range(ranks)]
        samples, *_ = (part.result() for part in parts)
    return {form: {name: summary(values) for name, values in rows.items()} for form, rows in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    rounding: Callable[[float], float] = lambda value: round(value, 4)  # noqa: E731
    return {"median": rounding(statistics.median(values)), "min": rounding(min(values)), "max": rounding(max(values))}


def main() -> None:
    """Measure one and two ranks, and write the result file."""
    parser = command_line(__doc__, "checkpoint")
    parser.add_argument("--megabytes", type=int, default=768, help="size of the whole state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where checkpoints are written; must exist")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {name: version(name) for name in ("torch", "safetensors")} | {"python": platform.python_version()},
        "megabytes": arguments.megabytes,
        "repeats": arguments.repeats,
    }
    result["ranks"] = {str(ranks): start(arguments, ranks) for ranks in (1, 2)}
    result["load_after"] = round(os.getloadavg()[0], 2)
    write_result(arguments.out, result)
    print(json.dumps(result["ranks"], indent=2))


if __name__ == "__main__":
    main()
