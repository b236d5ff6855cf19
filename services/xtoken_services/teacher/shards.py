"""A teacher divided over several GPUs: its first process owns the ring and starts the others, one per GPU.

Every process loads its part of the weights. Before each forward pass the first one sends the tokens to the others,
which run the same pass; the layers' collectives sum their partial results. If one process ends, all do: the supervisor
then restarts the teacher as a whole.
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.packing import PackedRow
from xtoken_services.common.processes.supervised import PYTHON

log = logging.getLogger("xtoken.teacher")

RENDEZVOUS = timedelta(minutes=10)
"""Limit until all processes have started."""
TIMEOUT = timedelta(days=1)
"""Limit of later collectives: a process waits for its next tokens as long as the run makes it wait."""
MODULE = "xtoken_services.teacher.shard"
STOPPING_S = 10.0


class ShardJob(BaseModel, frozen=True):
    """Settings of a process that computes a part of a teacher.

    Attributes:
        run: The resolved run, as JSON.
        teacher: Number of the teacher.
        shard: Number of the part, from 0; the first one's process owns the ring.
        devices: Device of every part.
        rendezvous: File by which the processes find each other.
    """

    run: str
    teacher: int
    shard: int
    devices: tuple[str, ...]
    rendezvous: str

    @property
    def device(self) -> torch.device:
        """Device of this process's part."""
        return torch.device(self.devices[self.shard])

    def join(self) -> None:
        """Join the process group of all parts, and choose this part's device."""
        device = self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            os.environ["LOCAL_RANK"] = str(device.index)  # transformers reads the device from it
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = FileStore(self.rendezvous, len(self.devices))
        dist.init_process_group(backend, store=store, rank=self.shard, world_size=len(self.devices), timeout=RENDEZVOUS)
        _set_pg_timeout(TIMEOUT, None)


@contextmanager
def started_shards(run: ResolvedRun, teacher: int, devices: Sequence[torch.device]) -> Iterator[None]:
    """Start the processes of a teacher's other parts and join their process group; end them with the context.

    Args:
        run: The run.
        teacher: Number of the teacher.
        devices: Device of every part; this process computes the first one.
    """
    with tempfile.TemporaryDirectory(prefix="xtoken-shards-") as directory:
        document, names = run.model_dump_json(), tuple(map(str, devices))
        jobs = [
            ShardJob(run=document, teacher=teacher, shard=shard, devices=names, rendezvous=f"{directory}/rendezvous")
            for shard in range(len(devices))
        ]
        processes = [_start(job) for job in jobs[1:]]
        closing = threading.Event()
        for shard, process in enumerate(processes, 1):
            threading.Thread(target=_watch, args=(process, shard, closing), daemon=True).start()
        jobs[0].join()
        try:
            yield
        finally:
            closing.set()
            _end(processes)
            if not torch.cuda.is_available():  # NCCL would wait for the others
                dist.destroy_process_group()


def _start(job: ShardJob) -> subprocess.Popen[str]:
    process = subprocess.Popen([*PYTHON, MODULE], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(job.model_dump_json() + "\n")
    process.stdin.flush()  # left open: it ends with this process, and the other one then exits
    return process


def _watch(process: subprocess.Popen[str], shard: int, closing: threading.Event) -> None:
    """End this process if another part's ends: collectives would wait for it for ever."""
    status = process.wait()
    if not closing.is_set():
        log.error("the process of part %d of this teacher ended with status %d", shard, status)
        os._exit(status if status > 0 else 1)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        try:
            process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send_tokens(tokens: Tensor, row: PackedRow | None) -> None:
    """Send the tokens of a forward pass to the processes of the other parts.

    Args:
        tokens: `[B, T]` int64, on the host.
        row: The layout of a packed row; None: each row is a sample.
    """
    lengths = () if row is None else row.lengths
    dist.broadcast(torch.tensor([*tokens.shape, len(lengths)]), src=0)
    dist.broadcast(torch.cat([tokens.flatten().long(), torch.tensor(lengths, dtype=torch.int64)]), src=0)


def receive_tokens() -> tuple[Tensor, PackedRow | None]:
    """Return the next tokens `[B, T]` that the first part's process sends, and the layout of a packed row."""
    header = torch.empty(3, dtype=torch.int64)
    dist.broadcast(header, src=0)
    rows, width, samples = header.tolist()
    payload = torch.empty(rows * width + samples, dtype=torch.int64)
    dist.broadcast(payload, src=0)
    tokens, lengths = payload[: rows * width], payload[rows * width :].tolist()
    return tokens.view(rows, width), PackedRow(tuple(lengths), width) if samples else None
