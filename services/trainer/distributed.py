"""The ranks of a trainer: what they must agree on. One rank needs no process group."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.distributed_c10d import _set_pg_timeout

from xtoken_core.errors import ConfigError, StaleSessionError

MEETING = timedelta(minutes=10)
"""How long ranks wait until all have started."""
TIMEOUT = timedelta(days=1)
"""How long they wait for each other later: a rank that hangs stops beating, and is ended by the run's own limits."""
BEAT = timedelta(seconds=2)
BUCKET_BYTES = 256 << 20
T = TypeVar("T")


class Group:
    """All ranks of one trainer.

    Args:
        rank: This process's rank.
        size: Number of ranks. With more than one, `MASTER_ADDR` and `MASTER_PORT` say where they meet.
        nodes: Number of node groups among whom they are shared out, equally and in order.

    Attributes:
        beat: Called every few seconds while the others are waited for.
        background: For one thread beside the training, a process group of its own; None for a single rank.

    Raises:
        ConfigError: The meeting place is not given.
    """

    def __init__(self, rank: int, size: int, nodes: int = 1) -> None:
        self.rank, self.size, self.nodes = rank, size, nodes
        self.beat: Callable[[], None] = _nothing
        self.background: dist.ProcessGroup | None = None
        if size == 1:
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"a trainer of {size} ranks needs {' and '.join(missing)} in the environment")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=MEETING)
        self.background = dist.new_group(backend="gloo", timeout=MEETING)
        for group in (None, self.background):
            _set_pg_timeout(TIMEOUT, group)

    @classmethod
    def of_environment(cls) -> Group | None:
        """The group that torchrun has described in the environment; None outside of torchrun. Set `nodes` then."""
        names = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")
        if any(name not in os.environ for name in names):
            return None
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which saves and reports."""
        return self.rank == 0

    @property
    def node(self) -> int:
        """The node group of this rank."""
        return self.rank * self.nodes // self.size

    @property
    def leads_node(self) -> bool:
        """Whether this is its node group's first rank, which rewinds and acknowledges in that group's queue."""
        return self.rank % (self.size // self.nodes) == 0

    def incarnation(self) -> int:
        """A number that is the same for all ranks, and higher at every later start."""
        return self.from_leader(time.time_ns())

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return self.any_of(flag)[0]

    def any_of(self, *flags: bool) -> list[bool]:
        """For each question, whether any rank says yes."""
        if self.size == 1:
            return list(flags)
        shared = torch.tensor([int(flag) for flag in flags])
        self._finish(dist.all_reduce(shared, async_op=True))
        return [bool(count) for count in shared.tolist()]

    def total(self, value: Tensor) -> Tensor:
        """The sum of all ranks' values, tensors without dimensions; on the device of this rank's own."""
        if self.size == 1:
            return value
        shared = value.double().cpu()
        self._finish(dist.all_reduce(shared, async_op=True))
        return shared.to(value)

    def from_leader(self, value: int) -> int:
        """Rank 0's value."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64)
        self._finish(dist.broadcast(shared, src=0, async_op=True))
        return int(shared.item())

    def from_node_leader(self, value: int) -> int:
        """The value of this node group's first rank."""
        if self.size == 1:
            return value
        values = self._all(torch.tensor([value], dtype=torch.int64))
        return int(values[self.node * (self.size // self.nodes)].item())

    def of_nodes(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every node group's first rank, as many from each."""
        if self.nodes == 1:
            return [list(numbers)]
        every = self._all(torch.tensor(list(numbers), dtype=torch.int64))
        return [found.tolist() for found in every[:: self.size // self.nodes]]

    def gather(self, mine: T) -> list[T]:
        """What every rank says, as JSON in padded byte tensors: ranks may differ in how much they have to say."""
        if self.size == 1:
            return [mine]
        plain = json.dumps(mine).encode()
        sizes = self._all(torch.tensor([len(plain)], dtype=torch.int64))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(plain)] = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        texts = [bytes(part[: int(size)].tolist()) for part, size in zip(self._all(padded), sizes, strict=True)]
        return [json.loads(text) for text in texts]

    def _all(self, mine: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        self._finish(dist.all_gather(gathered, mine, async_op=True))
        return gathered

    def _finish(self, work: dist.Work | None) -> None:
        """Wait for a collective on the host; the others may come to it late."""
        assert work is not None
        while not work.is_completed():
            with suppress(StaleSessionError):  # said again at the next step: a collective is not left in the middle
                self.beat()
            with suppress(RuntimeError):  # not yet
                work.wait(BEAT)
        work.wait()

    def sum_gradients(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over ranks: their denominators are the step's own, so there is nothing to average."""
        if self.size == 1:
            return
        every = list(weights)
        for weight in every:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        for bucket in buckets([weight.grad for weight in every if weight.grad is not None], BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat)
            parts = _unflatten_dense_tensors(flat, bucket)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(bucket, list(parts))

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            self.any(False)

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _nothing() -> None:
    """Nobody listens."""


def buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Tensors in their order, as many of one dtype together as `limit` bytes allow, at least one."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
