"""Which processes a run has: their names, commands and environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.protocol.run import TRAIN, teacher_task

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
    """

    kind: Kind
    name: str
    group: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    task: str = ""

    def command_of(self, incarnation: int) -> list[str]:
        """The command line of one start."""
        number = [] if self.kind == "queue" else ["--incarnation", str(incarnation)]
        return [*self.command, *number]


def fleet_of(run: ResolvedRun, resolved_file: Path, queue: Address) -> tuple[Member, ...]:
    """All processes of a run: its queue, collators, a teacher per teacher and rank, a trainer per rank."""
    workers = run.spec.workers
    token = ("--token-file", str(queue.token_file)) if queue.token_file else ()
    worker = ("--queue", queue.url, *token)
    heavy = {THREADS: str(threads_of_model_workers(run.spec)), **PATIENT_THREADS}
    light = {THREADS: "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    members = [_member("queue", "queue", ("--bind", queue.url, *token, "--run", str(resolved_file)), light)]
    for index in range(workers.collators):
        name = f"collator-{index}"
        members.append(_member("collator", name, (*worker, "--name", name), light))
    for teacher, rank in product(range(len(run.spec.teacher)), range(workers.ranks)):
        name = f"teacher-{teacher}-{rank}"
        place = (*worker, "--name", name, "--teacher", str(teacher), "--rank", str(rank))
        members.append(_member("teacher", name, place, heavy, task=teacher_task(teacher)))
    for rank in range(workers.ranks):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers.ranks)}
        env = heavy | ranks if workers.ranks > 1 else heavy
        name = f"trainer-{rank}"
        place = (*worker, "--name", name, "--rank", str(rank))
        members.append(_member("trainer", name, place, env, group="trainers", task=TRAIN))
    return tuple(members)


def threads_of_model_workers(spec: RunSpec) -> int:
    """How many threads a teacher or trainer gets: the machine's cores shared out, or what the user has set."""
    chosen = os.environ.get(THREADS, "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    processes = spec.workers.ranks * (1 + len(spec.teacher))
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _member(
    kind: Kind, name: str, arguments: tuple[str, ...], env: Mapping[str, str], *, group: str = "", task: str = ""
) -> Member:
    command = (sys.executable, "-m", "services.cli", kind, *arguments)
    return Member(kind, name, group or name, command, env, task)
