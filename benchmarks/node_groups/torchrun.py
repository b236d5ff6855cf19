"""Node groups whose processes run without a supervisor: trainers by torchrun, all restarted if they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.supervisor.launchers.local import LOOPBACK, free_port

ROOT = Path(__file__).parents[2]
RESTART_DELAY_S = 0.5
MAX_RESTARTS = 40
POLL_S = 0.05
CANNOT_HELP = 2
"""Exit status of a process that a restart cannot help."""


@dataclass
class KeptProcess:
    """One process that is started again when it fails, as an init system would do it."""

    name: str
    command: Sequence[str]
    env: dict[str, str]
    log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    due: float = 0.0
    statuses: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True once it has exited with 0."""
        return self.process is None and self.statuses[-1:] == [0]

    def poll(self) -> None:
        """Start it, also again after a failure.

        Raises:
            RuntimeError: It has failed too often, or a restart cannot help.
        """
        if self.process is not None:
            status = self.process.poll()
            if status is None:
                return
            self.process, self.due = None, time.monotonic() + RESTART_DELAY_S
            self.statuses.append(status)
            if status == CANNOT_HELP or self.starts > MAX_RESTARTS:
                raise RuntimeError(f"{self.name} exited with {self.statuses}, see {self.log.name}")
        if not self.finished and time.monotonic() >= self.due:
            self.process = subprocess.Popen(
                self.command, env=self.env, cwd=ROOT, stdout=self.log, stderr=self.log, start_new_session=True
            )
            self.starts += 1

    def tree(self) -> list[psutil.Process]:
        """Return its process and everything that this has started."""
        if self.process is None:
            return []
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, *, only_children: bool = False) -> None:
        """Send SIGKILL to the process and everything that it has started, or to the latter only."""
        for process in self.tree()[only_children:]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


class TorchrunGroups:
    """The processes of all node groups of a run, one GPU each.

    Args:
        spec: The run.
        directory: Directory of the logs and of the queues' tokens.
    """

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        directory.mkdir(parents=True)
        file = spec.output / "resolved.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(resolve_run(spec).model_dump_json(), encoding="utf-8")
        self.groups: list[dict[str, KeptProcess]] = []
        nodes, port = spec.workers.nodes, free_port(LOOPBACK)
        for node in range(nodes):
            address = [f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}", "--token-file", str(directory / f"token-{node}")]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            if spec.workers.device == "cuda":
                env["CUDA_VISIBLE_DEVICES"] = str(node)
            program = [sys.executable, "-m", "xtoken_services.cli"]
            meeting = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", "1"]
            meeting += ["--master-addr", LOOPBACK, "--master-port", str(port), "--max-restarts", "0"]
            commands = {
                "queue": [*program, "queue", "--bind", *address, "--run", str(file), "--group", str(node)],
                "collator": [*program, "collator", "--queue", *address],
                "teacher": [*program, "teacher", "--queue", *address],
                "trainer": [
                    sys.executable, "-m", "torch.distributed.run", *meeting,
                    "-m", "xtoken_services.cli", "trainer", "--queue", *address,
                ],
            }  # fmt: skip
            self.groups.append(
                {
                    kind: KeptProcess(
                        f"node{node}-{kind}", command, env, (directory / f"node{node}-{kind}.log").open("wb")
                    )
                    for kind, command in commands.items()
                }
            )

    def poll(self) -> bool:
        """Start what has to be started; return whether all trainers have finished.

        Raises:
            RuntimeError: A process has failed too often.
        """
        for group in self.groups:
            for process in group.values():
                process.poll()
        return all(group["trainer"].finished for group in self.groups)

    def kill(self, node: int, victim: str) -> None:
        """Send SIGKILL to a group's trainer, or to all of the group with the process that started the trainer."""
        if victim == "trainer":
            self.groups[node]["trainer"].kill(only_children=True)
        else:
            for process in self.groups[node].values():
                process.kill()

    @property
    def restarts(self) -> dict[str, int]:
        """Starts beyond the first, by process."""
        return {process.name: process.starts - 1 for group in self.groups for process in group.values()}

    def close(self) -> None:
        """End what is left."""
        for group in self.groups:
            for process in group.values():
                process.kill()
                if process.process is not None:
                    process.process.wait()
                process.log.close()
