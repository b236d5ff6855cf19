"""The processes of a run, its queue and its cluster, and how they pass on what teachers send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from xtoken_core.config.base import ConfigModel, Count
from xtoken_core.config.loss import Positive

TransportName = Literal["auto", "cuda_ipc", "shared_memory", "queue"]
Content = Literal["logits", "hidden", "topk"]

TOGETHER_S = 20.0
"""Minimum of seconds for several ranks to leave a run together."""


class QueueSpec(ConfigModel):
    """The transfer queue of the run."""

    memory_limit: Count = 1 << 30
    """Maximum of bytes of samples in memory."""
    block_size: Count | None = None
    """Positions that a collator leases at once; divides samples_per_step. Left out: the largest divisor up to 16."""
    span_steps: Annotated[int, Field(ge=3)] = 3
    """Steps by which collators may be ahead of the trainer."""
    max_dead: Annotated[int, Field(ge=0)] = 0
    """More dead letters than this end the run."""


class WorkersSpec(ConfigModel):
    """The processes of the run."""

    launcher: Literal["local", "ray"] = "local"
    """Launcher of the processes: `local` on this machine, `ray` on the nodes of a Ray cluster (`[ray]`)."""
    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Node groups. Each has a queue, collators, teachers and trainers of its own and an equal part of every step; only
    gradients cross nodes. With `ray` each is on a node of its own; with `local` all are on this machine and divide its
    GPUs."""
    collators: Count = 2
    """Collator processes, of each node group."""
    ranks: Count = 1
    """Student processes of each node group; each has a teacher process of its own per teacher."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one; rank r uses GPU r modulo their number."""
    transport: TransportName = "auto"
    """How the teachers' signal reaches the student: `auto` is `cuda_ipc` on a GPU and `shared_memory` elsewhere;
    `queue` reaches another node and carries hidden states or largest logits. What is sent is `teacher.content`."""
    slots: Annotated[int, Field(ge=1, le=64)] = 2
    """Micro-batches that a teacher may be ahead of its student."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts of a worker without progress in between before the run fails."""
    hang_timeout_s: Positive = 600.0
    """Seconds without progress after which a worker counts as hung, while it loads as between its steps."""
    stop_timeout_s: Positive = 120.0
    """Seconds that workers have for a graceful shutdown, in which the trainer writes a checkpoint."""


class RaySpec(ConfigModel):
    """The Ray cluster of a run with `workers.launcher = "ray"`. Every node sees the same files at the same paths.

    A node group takes a CPU of Ray's per process, and GPUs for its ranks and divided teachers.
    """

    address: Annotated[str, Field(pattern=r"^(auto|[A-Za-z0-9.:\[\]_-]+:[0-9]{1,5})$", max_length=256)] = "auto"
    """The head's `HOST:PORT`; `auto` is the cluster that this machine belongs to."""
    wait_s: Positive = 300.0
    """Seconds that the run waits for nodes, at its start and after losing one, before it fails."""


def check_placement(workers: WorkersSpec) -> None:
    """Refuse impossible placements of a run's processes.

    Raises:
        ValueError: The settings that exclude each other, and what to do.
    """
    if workers.device == "cpu" and workers.transport == "cuda_ipc":
        raise ValueError(
            f'workers.transport = "{workers.transport}" needs GPUs, and workers.device is "cpu": use "auto"'
        )
    if workers.nodes * workers.ranks > 1 and workers.stop_timeout_s < TOGETHER_S:
        raise ValueError(
            f"workers.stop_timeout_s = {workers.stop_timeout_s:g}: several ranks may need seconds to leave together "
            f"before they save: at least {TOGETHER_S:g}"
        )
    if workers.launcher == "ray" and workers.device == "auto":
        raise ValueError('workers.launcher = "ray" must know what a node needs: set workers.device to "cuda" or "cpu"')


def check_content(workers: WorkersSpec, contents: Sequence[Content | None]) -> None:
    """Refuse contradictions between what teachers send and how it is carried.

    Raises:
        ValueError: The settings that exclude each other, and what to do.
    """
    for number, content in enumerate(contents):
        if workers.transport == "queue" and content == "logits":
            raise ValueError(
                f'teacher.{number}.content = "logits" is too large for the queue: use "hidden" or "topk", or another '
                "workers.transport"
            )
