"""Which processes a run has: their names, commands and environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.queue.run.names import TRAIN, teacher_task

Kind = Literal["queue", "collator", "teacher", "trainer"]
STOP_ORDER: tuple[Kind, ...] = ("trainer", "teacher", "collator", "queue")
THREADS = "OMP_NUM_THREADS"
PATIENT_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait sleep: teacher and student share the cores, and spinning takes them from the other."""


@dataclass(frozen=True)
class Member:
    """One process of a run.

    Attributes:
        name: The name of its session and of its logs.
        group: Members of one group are restarted together, under one incarnation number.
        command: Its command line; `--incarnation N` is added, except for the queue.
        env: What its environment has beyond the supervisor's own.
        task: The queue's task whose samples it leases, if it leases any.
        node: The node group that it belongs to.
    """

    kind: Kind
    name: str
    group: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    task: str = ""
    node: int = 0

    def command_of(self, incarnation: int) -> list[str]:
        """The command line of one start."""
        number = [] if self.kind == "queue" else ["--incarnation", str(incarnation)]
        return [*self.command, *number]


def fleet_of(run: ResolvedRun, resolved_file: Path, queues: Sequence[Address]) -> tuple[Member, ...]:
    """All processes of a run: of each node group its queue, collators, a teacher per teacher and rank, trainers.

    Args:
        run: The run.
        resolved_file: Where the queues read it.
        queues: Where they are, one per node group.
    """
    return tuple(
        member for node, queue in enumerate(queues) for member in _NodeGroup(run, node, queue).members(resolved_file)
    )


class _NodeGroup:
    """The processes of one node group; with several groups their names say which. All trainers stay one group."""

    def __init__(self, run: ResolvedRun, node: int, queue: Address) -> None:
        self.run, self.node, self.queue = run, node, queue
        self.prefix = f"node{node}-" if run.spec.workers.nodes > 1 else ""
        self.proof: tuple[str, ...] = ("--token-file", str(queue.token_file)) if queue.token_file else ()
        if queue.keys is not None:
            self.proof = ("--keys", str(queue.keys))

    def members(self, resolved_file: Path) -> Iterator[Member]:
        """Its queue first."""
        workers, teachers = self.run.spec.workers, len(self.run.spec.teacher)
        heavy = {THREADS: str(threads_of_model_workers(self.run.spec)), **PATIENT_THREADS}
        light = {THREADS: "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        serve = ["--bind", self.queue.url, *self.proof, "--run", str(resolved_file)]
        serve += ["--group", str(self.node)] if self.node else []
        yield self._member("queue", "queue", tuple(serve), light)
        for index in range(workers.collators):
            yield self._worker("collator", f"collator-{index}", (), light)
        for teacher, rank in product(range(teachers), range(workers.ranks)):
            place = ("--teacher", str(teacher), "--rank", str(rank))
            yield self._worker("teacher", f"teacher-{teacher}-{rank}", place, heavy, task=teacher_task(teacher))
        for rank in range(workers.ranks):
            world = {"RANK": str(self.node * workers.ranks + rank), "WORLD_SIZE": str(self.run.world)}
            env = heavy | world | {"LOCAL_RANK": str(rank)} if self.run.world > 1 else heavy
            yield self._worker("trainer", f"trainer-{rank}", ("--rank", str(rank)), env, group="trainers", task=TRAIN)

    def _worker(
        self, kind: Kind, name: str, place: tuple[str, ...], env: Mapping[str, str], *, group: str = "", task: str = ""
    ) -> Member:
        arguments = ("--queue", self.queue.url, *self.proof, "--name", self.prefix + name, *place)
        return self._member(kind, name, arguments, env, group=group, task=task)

    def _member(
        self, kind: Kind, name: str, arguments: tuple[str, ...], env: Mapping[str, str], *, group: str = "",
        task: str = "",
    ) -> Member:  # fmt: skip
        command = (sys.executable, "-P", "-m", "services.cli", kind, *arguments)  # -P: ours, whatever lies around
        return Member(kind, self.prefix + name, group or self.prefix + name, command, env, task, self.node)


def threads_of_model_workers(spec: RunSpec) -> int:
    """How many threads a teacher or trainer gets: the machine's cores shared out, or what the user has set."""
    chosen = os.environ.get(THREADS, "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    workers, cores = spec.workers, len(os.sched_getaffinity(0))
    processes = workers.ranks * (1 + len(spec.teacher))
    if workers.launcher == "ray":
        cores = int(spec.ray.cpus or cores)  # nodes are alike
    else:
        processes *= workers.nodes
    return max(1, cores // processes)
