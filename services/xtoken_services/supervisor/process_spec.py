"""The processes of a run: their names, commands and environments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.queue.run.names import TRAIN, teacher_task
from xtoken_services.common.http_engine.keys import VARIABLE as ENGINE_KEY
from xtoken_services.common.processes.supervised import PYTHON, SINGLE_THREADED
from xtoken_services.common.run.machine import visible_gpus
from xtoken_services.supervisor.environment import HUB_TOKEN, PASSIVE_THREADS, THREADS, WANDB_KEY

Kind = Literal["queue", "collator", "rollout", "teacher", "trainer", "writer"]
STOP_ORDER: tuple[Kind, ...] = ("trainer", "writer", "teacher", "rollout", "collator", "queue")


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a run.

    Attributes:
        kind: Kind of worker.
        name: Name of its session and of its logs.
        group: Name of its process group, whose processes are restarted together under one incarnation number.
        command: Its command line; `--incarnation N` is added for those with a session on a queue.
        env: Variables that are added to the supervisor's own environment.
        task: The queue's task whose samples it leases, if it leases any.
        node: Number of its node group.
        secrets: Names of variables with keys that it uses.
    """

    kind: Kind
    name: str
    group: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    task: str = ""
    node: int = 0
    secrets: tuple[str, ...] = ()

    def command_line(self, incarnation: int) -> list[str]:
        """Return the command line of one start."""
        number = [] if self.kind in ("queue", "writer") else ["--incarnation", str(incarnation)]
        return [*self.command, *number]


def build_process_specs(
    run: ResolvedRun, resolved_file: Path, queues: Sequence[Address], loss: str | None = None
) -> tuple[ProcessSpec, ...]:
    """Return all processes of a run: per node group a queue, collators, a teacher per teacher and rank, trainers.

    A run with rollouts has rollout workers too, and no collators if all of its samples are prompts.

    Args:
        run: The run.
        resolved_file: File from which the queues read it.
        queues: Addresses of the queues, one per node group.
        loss: `module:Class` of a custom loss; only trainers compute a loss.
    """
    return tuple(
        spec
        for node, queue in enumerate(queues)
        for spec in _NodeProcesses(run, node, queue, loss).specs(resolved_file)
    )


class _NodeProcesses:
    """The processes of one node group. All trainers of a run form one process group, whatever their node."""

    def __init__(self, run: ResolvedRun, node: int, queue: Address, loss: str | None = None) -> None:
        self.loss: tuple[str, ...] = ("--loss", loss) if loss is not None else ()
        self.run, self.node, self.queue = run, node, queue
        self.prefix = f"node{node}-" if run.spec.workers.nodes > 1 else ""
        self.credentials: tuple[str, ...] = ("--keys", str(queue.keys)) if queue.keys is not None else ()
        self.gpus = gpus_of_node(run.spec, node)

    def specs(self, resolved_file: Path) -> Iterator[ProcessSpec]:
        """Yield the processes, the queue first."""
        workers, teachers = self.run.spec.workers, self.run.spec.teacher
        heavy = heavy_environment(self.run.spec)
        light = SINGLE_THREADED
        serve = ["--run", str(resolved_file), *(["--group", str(self.node)] if self.node else [])]
        yield self._spec("queue", "queue", serve, light)
        for index in range(workers.collators if self.run.spec.has_text else 0):
            yield self._spec("collator", f"collator-{index}", (), light)
        for index in range(self.run.spec.rollout.workers if self.run.spec.rollout else 0):
            yield self._spec("rollout", f"rollout-{index}", ("--rank", str(index)), heavy)
        for number, rank in product(range(len(teachers)), range(workers.ranks)):
            role = ("--teacher", str(number), "--rank", str(rank))
            env = heavy if teachers[number].store is None else light
            yield self._spec("teacher", f"teacher-{number}-{rank}", role, env, task=teacher_task(number))
        for rank in range(workers.ranks):
            world = {"RANK": str(self.node * workers.ranks + rank), "WORLD_SIZE": str(self.run.world)}
            env = heavy | world | {"LOCAL_RANK": str(rank)} if self.run.world > 1 else heavy
            own = ("--rank", str(rank), *self.loss)
            yield self._spec("trainer", f"trainer-{rank}", own, env, group="trainers", task=TRAIN)

    def _spec(
        self, kind: Kind, name: str, role: Sequence[str], env: Mapping[str, str], *, group: str = "", task: str = ""
    ) -> ProcessSpec:
        """Return a process; `role` is what its command line has beside the queue's address and its name."""
        name = self.prefix + name
        named = () if kind == "queue" else ("--name", name)
        address = ("--bind" if kind == "queue" else "--queue", self.queue.url, *self.credentials)
        command, secrets = cli_command(kind, *address, *named, *role), secrets_of(self.run.spec, kind)
        return ProcessSpec(kind, name, group or name, command, {**env, **self.gpus}, task, self.node, secrets)


def writer_specs(run: ResolvedRun, resolved_file: Path, store: str) -> tuple[ProcessSpec, ...]:
    """Return the processes of a store's build: a writer per rank, and no queue.

    Args:
        run: The build.
        resolved_file: File from which they read it.
        store: Directory or address of the store.
    """
    env, secrets = heavy_environment(run.spec), secrets_of(run.spec, "writer")

    def spec(rank: int) -> ProcessSpec:
        command = cli_command("store", "write", str(resolved_file), "--out", store, "--rank", str(rank))
        return ProcessSpec("writer", f"writer-{rank}", f"writer-{rank}", command, env, secrets=secrets)

    return tuple(map(spec, range(run.spec.workers.ranks)))


def secrets_of(spec: RunSpec, kind: Kind) -> tuple[str, ...]:
    """Return the names of the variables with keys that a kind of worker uses."""
    if kind == "trainer":
        uses = {HUB_TOKEN: spec.push_to is not None, WANDB_KEY: spec.report.wandb == "online"}
    else:
        models = {"teacher": spec.teacher, "writer": spec.teacher, "rollout": (spec.rollout,)}.get(kind, ())
        uses = {ENGINE_KEY: any(model and model.url and not model.url_key_file for model in models)}
    return tuple(name for name, used in uses.items() if used)


def cli_command(*arguments: str) -> tuple[str, ...]:
    """Return the command line of one of this program's commands."""
    return (*PYTHON, "xtoken_services.cli", *arguments)


def heavy_environment(spec: RunSpec) -> dict[str, str]:
    """Return the variables of a process that computes with a model."""
    return {THREADS: str(threads_of_model_workers(spec)), **PASSIVE_THREADS}


def gpus_of_node(spec: RunSpec, node: int) -> dict[str, str]:
    """Return the variable by which a node group sees its part of this machine's GPUs; empty if it sees all.

    Args:
        spec: The run.
        node: Number of the node group.
    """
    workers = spec.workers
    if workers.nodes == 1 or workers.launcher == "ray" or workers.device == "cpu" or not (gpus := visible_gpus()):
        return {}
    part = len(gpus) // workers.nodes
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[node * part : (node + 1) * part])}


def threads_of_model_workers(spec: RunSpec) -> int:
    """Return the threads of a teacher or trainer: an equal part of the machine's cores, or the user's setting."""
    setting = os.environ.get(THREADS, "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    workers, cores = spec.workers, len(os.sched_getaffinity(0))
    processes = workers.ranks + spec.teacher_processes + (spec.rollout.workers if spec.rollout else 0)
    if workers.launcher != "ray":  # a node of Ray has one group, and all nodes are alike
        processes *= workers.nodes
    return max(1, cores // processes)
