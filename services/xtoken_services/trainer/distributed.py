"""Collectives among the ranks of a trainer, and reductions over its node groups; a single rank needs no group."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.distributed_c10d import _set_pg_timeout

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.run_client import RunClient
from xtoken_core.errors import ConfigError, StaleSessionError
from xtoken_core.packing import groups_within
from xtoken_services.common.batches.step_plan import StepPlan

RENDEZVOUS = timedelta(minutes=10)
"""Limit for the rendezvous: until all ranks have started."""
TIMEOUT = timedelta(days=1)
"""Limit for later collectives. A rank that hangs stops its heartbeat and is ended by the supervisor, much earlier."""
BEAT = timedelta(seconds=2)
BUCKET_BYTES = 256 << 20
TEXT_BYTES = 512
"""Of each text that `exchange_in_background` sends; the rest is cut off."""
T = TypeVar("T")
log = logging.getLogger("xtoken.trainer")
Reasons = dict[int, str]


class RankGroup:
    """All ranks of one trainer: a thin layer over `torch.distributed`, without effect for a single rank.

    Small values travel over gloo on the host, in the thread that asks; gradients over the device's own backend.

    Args:
        rank: This process's rank.
        size: Number of ranks. With more than one, `MASTER_ADDR` and `MASTER_PORT` name the rendezvous.
        nodes: Number of node groups; each has `size / nodes` consecutive ranks.

    Attributes:
        beat: Heartbeat, called every few seconds while a collective waits for other ranks.
        background: Process group of the checkpoint thread, so that its collectives never mix with the training's; None
            for a single rank.

    Raises:
        ConfigError: The rendezvous is not given.
    """

    def __init__(self, rank: int, size: int, nodes: int = 1) -> None:
        self.rank, self.size, self.nodes = rank, size, nodes
        self.beat: Callable[[], None] = lambda: None
        self.background: dist.ProcessGroup | None = None
        self._peers: PeerMonitor | None = None
        if size == 1:
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"a trainer of {size} ranks needs {' and '.join(missing)} in the environment")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=RENDEZVOUS)
        self.background = dist.new_group(backend="gloo", timeout=RENDEZVOUS)
        for group in (None, self.background):
            _set_pg_timeout(TIMEOUT, group)

    @classmethod
    def of_environment(cls) -> RankGroup | None:
        """Return the group that torchrun has set up, its `nodes` still to be set; None without torchrun."""
        names = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")
        if any(name not in os.environ for name in names):
            return None
        group = cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if group.size > 1:
            peers = dist.new_group(backend="gloo", timeout=RENDEZVOUS)
            _set_pg_timeout(TIMEOUT, peers)
            group._peers = PeerMonitor(peers)
        return group

    @property
    def is_leader(self) -> bool:
        """True on rank 0, which saves and logs."""
        return self.rank == 0

    @property
    def node(self) -> int:
        """Number of this rank's node group."""
        return self.rank * self.nodes // self.size

    @property
    def is_node_leader(self) -> bool:
        """True on the first rank of a node group, which rewinds and acknowledges in that group's queue."""
        return self.rank % (self.size // self.nodes) == 0

    def incarnation(self) -> int:
        """Return a number that is the same on all ranks, and higher at every later start."""
        return self.broadcast(time.time_ns())

    def any(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is True on any."""
        return self.any_of(flag)[0]

    def any_of(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is True on any rank."""
        if self.size == 1:
            return list(flags)
        shared = torch.tensor([int(flag) for flag in flags])
        self._finish(dist.all_reduce(shared, async_op=True))
        return [bool(count) for count in shared.tolist()]

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Return the sum of a scalar tensor over all ranks, on the device of this rank's own."""
        if self.size == 1:
            return value
        shared = value.double().cpu()
        self._finish(dist.all_reduce(shared, async_op=True))
        return shared.to(value)

    def broadcast(self, value: int) -> int:
        """Return rank 0's value."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64)
        self._finish(dist.broadcast(shared, src=0, async_op=True))
        return int(shared.item())

    def broadcast_in_node(self, value: int) -> int:
        """Return the value of this node group's first rank."""
        if self.size == 1:
            return value
        values = self._all(torch.tensor([value], dtype=torch.int64))
        return int(values[self.node * (self.size // self.nodes)].item())

    def gather_nodes(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every node group's first rank, equally many from each."""
        if self.nodes == 1:
            return [list(numbers)]
        every = self._all(torch.tensor(list(numbers), dtype=torch.int64))
        return [found.tolist() for found in every[:: self.size // self.nodes]]

    def all_gather(self, mine: T) -> list[T]:
        """Return every rank's object, in rank order.

        It travels as JSON in byte tensors padded to the longest: ranks may differ in size, and nothing is pickled.
        """
        if self.size == 1:
            return [mine]
        plain = json.dumps(mine).encode()
        sizes = self._all(torch.tensor([len(plain)], dtype=torch.int64))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(plain)] = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        texts = [bytes(part[: int(size)].tolist()) for part, size in zip(self._all(padded), sizes, strict=True)]
        return [json.loads(text) for text in texts]

    def exchange_in_background(self, mine: str) -> list[str]:
        """Return every rank's text, in rank order; called by the checkpoint thread of all ranks."""
        if self.background is None:
            return [mine]
        plain = mine.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        texts = [torch.empty(TEXT_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.frombuffer(bytearray(plain), dtype=torch.uint8), group=self.background)
        return [bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore") for text in texts]

    def _all(self, mine: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        self._finish(dist.all_gather(gathered, mine, async_op=True))
        return gathered

    def _finish(self, work: dist.Work | None) -> None:
        """Wait for a collective on the host, with heartbeats, since other ranks may enter it late."""
        assert work is not None
        while not work.is_completed():
            with suppress(
                StaleSessionError
            ):  # raised again at the next step: leaving a collective would hang the others
                self.beat()
            with suppress(RuntimeError):  # not completed within BEAT
                work.wait(BEAT)
        work.wait()

    def all_reduce_gradients(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """All-reduce gradients in buckets.

        They are summed, not averaged: each rank's loss is divided by the whole step's denominators already.
        """
        if self.size == 1:
            return
        every = list(weights)
        for weight in every:
            if weight.grad is None:  # a rank without a micro-batch must still enter every all-reduce
                weight.grad = torch.zeros_like(weight)
        for bucket in buckets([weight.grad for weight in every if weight.grad is not None], BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat)
            parts = _unflatten_dense_tensors(flat, bucket)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(bucket, list(parts))

    def barrier(self) -> None:
        """Wait until all ranks have entered."""
        self.any(False)

    def close(self, *, failed: bool = False) -> None:
        """Destroy the process group.

        Args:
            failed: This rank leaves because of an error, while others may wait for it in a collective.
        """
        if self._peers is not None:
            self._peers.close(failed=failed)
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield tensors in their order, as many of one dtype together as `limit` bytes allow, at least one."""
    for _, alike in groupby(tensors, lambda tensor: tensor.dtype):
        yield from groups_within(alike, lambda tensor: tensor.nbytes, limit)


EVERY_S = 1.0
GRACE_S = 5.0
CLOSE_S = 5.0


class RankState(IntEnum):
    """State that a rank reports; the highest of all ranks counts."""

    ALIVE = 0
    CLOSING = 1
    FAILED = 2


class PeerMonitor:
    """Thread that ends this process if another rank fails or exits during the training.

    A collective of NCCL may wait on the GPU for a process that is gone, and its time limit is a day. A supervisor
    restarts all ranks itself; torchrun only waits for each of its own processes to exit.

    Args:
        group: A gloo process group of its own, so that the thread's collectives never mix with others.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._state = RankState.ALIVE
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="peers", daemon=True)
        self._thread.start()

    def close(self, *, failed: bool) -> None:
        """Report that this rank leaves the group.

        Args:
            failed: It leaves because of an error. The process then ends after `GRACE_S`, also if it hangs.
        """
        self._state = RankState.FAILED if failed else RankState.CLOSING
        self._wake.set()
        self._thread.join(0 if failed else CLOSE_S)

    def _exchange(self) -> None:
        """Exchange the states once a second: the body of the thread."""
        while True:
            self._wake.wait(EVERY_S)
            highest = torch.tensor([self._state])
            try:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
            except RuntimeError:  # a connection was closed
                highest.fill_(RankState.FAILED)
            if highest == RankState.ALIVE:
                continue
            if highest == RankState.CLOSING or self._state == RankState.CLOSING:
                return
            break
        if self._state == RankState.ALIVE:
            log.error("another rank has failed or was killed: this process exits, to be restarted with it")
        time.sleep(GRACE_S)  # the error that the main thread gets, if it gets one, is logged first
        os._exit(1)


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step's positions, over all node groups.

    Attributes:
        ids: Trained positions.
        skipped: Positions without a row, with their reason.
        dead: Dead letters, with their reason.
    """

    ids: tuple[int, ...]
    skipped: Reasons
    dead: Reasons


def reduce_plan(step: StepPlan, group: RankGroup) -> StepPlan:
    """Return a node group's step with the denominators and the micro-batch count of all groups; all ranks call.

    Its positions stay the group's own; `step_outcome` gathers those of the others after the step.
    """
    if group.nodes == 1:
        return step
    # One exchange for all: a collective's latency is the cost, not its size.
    teachers = len(step.kd_chunks)
    counts = [step.plan.micro_batches, step.ce_tokens, step.tokens, step.truncated, *step.kd_chunks]
    columns = list(zip(*group.gather_nodes([*counts, *step.samples_of, *step.text_of, *step.tokens_of]), strict=True))
    ce_tokens, tokens, truncated, *others = (sum(column) for column in columns[1:])
    kd_chunks, by_route = others[:teachers], others[teachers:]  # nothing by route in a run without routes
    return replace(
        step,
        # Every rank has as many backward passes, or one would wait in a collective for ever.
        plan=step.plan.filled_up(max(columns[0]), sides=1 + teachers),
        ce_tokens=ce_tokens,
        tokens=tokens,
        truncated=truncated,
        kd_chunks=tuple(kd_chunks),
        samples_of=tuple(by_route[:teachers]),
        text_of=tuple(by_route[teachers : 2 * teachers]),
        tokens_of=tuple(by_route[2 * teachers :]),
    )


def step_outcome(step: StepPlan, group: RankGroup, queue: RunClient) -> StepOutcome:
    """Return the outcome of all positions of a step; all ranks call."""
    skipped = reasons_of(queue, "skipped", step.skipped)
    dead = reasons_of(queue, "dead", step.dead)
    if group.nodes == 1:
        return StepOutcome(step.ids, skipped, dead)
    mine: list[Any] = [list(step.ids), list(skipped.items()), list(dead.items())]
    # Ranks of a node group have the same plan: the first one of each group speaks for it.
    firsts = group.all_gather(mine)[:: group.size // group.nodes]
    return StepOutcome(
        tuple(i for ids, _, _ in firsts for i in ids),
        {int(i): str(why) for _, reasons, _ in firsts for i, why in reasons},
        {int(i): str(why) for _, _, reasons in firsts for i, why in reasons},
    )


def reasons_of(queue: RunClient, state: str, ids: Iterable[int]) -> Reasons:
    """Return from the queue why positions are skipped or dead."""
    wanted = sorted(ids)
    if not wanted:
        return {}
    span = wanted[-1] - wanted[0] + 1
    listed = queue.client.list_samples(queue.partition, state, after=wanted[0] - 1, limit=span)
    return {i: listed.reasons.get(i, "") for i in wanted}


def own_positions(reasons: Reasons, run: ResolvedRun) -> Reasons:
    """Return the entries of positions that belong to this node group."""
    return {i: why for i, why in reasons.items() if run.owns(i)}
