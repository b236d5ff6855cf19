"""A run of scripted workers around a real queue, and a look at what processes it leaves."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support import runs
from tests.support.runs import revised_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.address import Address
from xtoken_services.common.run.status import RunStatus, WorkerStatus
from xtoken_services.supervisor import run as run_module
from xtoken_services.supervisor.launchers.local import LocalLauncher
from xtoken_services.supervisor.process_spec import ProcessSpec
from xtoken_services.supervisor.run_record import RunResult
from xtoken_services.supervisor.supervisor import Limits, Supervisor

SCRIPT = Path(__file__).with_name("worker_script.py")
STEP = 4


def resolved_run(output: Path, steps: int, ranks: int = 1) -> ResolvedRun:
    """A run that no worker of the real kind could do: its files do not exist."""
    run = runs.resolved_run(Path("/no"), positions=steps * STEP, ranks=ranks)
    return revised_run(run, output=output, train={"samples_per_step": STEP}, queue={"memory_limit": 1 << 20})


def scripted_members(
    output: Path, state: Path, address: Address, steps: int, ranks: int = 1, *, rows: bool = False, **deeds: list[str]
) -> list[ProcessSpec]:
    """The queue and one scripted worker of each kind; `trainer_0=["work:kill"]` tells one what to do."""
    file = output / "resolved.json"
    file.write_text(resolved_run(output, steps, ranks).model_dump_json())
    real = (sys.executable, "-m", "xtoken_services.cli")
    token = ("--token-file", str(address.token_file)) if address.token_file else ()
    bind = ("--bind", address.url, *token, "--run", str(file))
    found = [ProcessSpec("queue", "queue", "queue", (*real, "queue", *bind))]
    names = ["collator-0", "teacher-0-0", *(f"trainer-{rank}" for rank in range(ranks))]
    for name in names:
        kind = name.split("-")[0]
        does = [item for deed in deeds.get(name.replace("-", "_"), []) for item in ("--do", deed)]
        rank = ("--rank", name.split("-")[-1]) if kind == "trainer" else ()
        command = (
            sys.executable, str(SCRIPT), kind, "--queue", address.url, *token, "--name", name,
            "--state", str(state), *rank, *does, *(["--rows"] if rows else []),
        )  # fmt: skip
        group = "trainers" if kind == "trainer" else name
        task = {"trainer": "train", "teacher": "teacher_0"}.get(kind, "")
        found.append(ProcessSpec(kind, name, group, command, {}, task))  # type: ignore[arg-type]
    return found


def use_scripted_workers(
    state: Path, steps: int, replace: Callable[[Any, str, Any], None] = setattr, **deeds: list[str]
) -> None:
    """Replace the workers of every run that this process starts by scripted ones, and skip the check of its files.

    Args:
        state: Directory of the files that the workers write.
        steps: Optimiser steps of a run.
        replace: Sets an attribute of a module; pass `monkeypatch.setattr` in a test.
        deeds: See `scripted_members`.
    """

    def specs(resolved: ResolvedRun, _file: Path, addresses: Sequence[Address], _loss: str | None) -> list[ProcessSpec]:
        return scripted_members(resolved.spec.output, state, addresses[0], steps, **deeds)

    def resolve(run: run_module.Run) -> tuple[ResolvedRun, list[str]]:
        return resolved_run(run.spec.output, steps).model_copy(update={"spec": run.spec}), []

    replace(run_module, "resolve_here", resolve)
    replace(run_module, "build_process_specs", specs)


class ScriptedRun:
    """A supervisor over a real queue and scripted workers."""

    def __init__(self, tmp: Path, sockets: Path) -> None:
        self.output, self.state, self.sockets = tmp / "out", tmp / "state", sockets
        self.output.mkdir()
        self.state.mkdir()
        self.address = Address.parse(f"ipc://{sockets / 'queue'}")
        self.supervisor: Supervisor | None = None
        self.ending: RunResult | None = None
        self._thread: threading.Thread | None = None

    def members(self, steps: int, ranks: int = 1, *, rows: bool = False, **deeds: list[str]) -> list[ProcessSpec]:
        """The run's processes; see `scripted_members`."""
        return scripted_members(self.output, self.state, self.address, steps, ranks, rows=rows, **deeds)

    def start(
        self, steps: int, ranks: int = 1, *, step: int = 0, limits: Limits | None = None, rows: bool = False,
        **deeds: list[str],
    ) -> Supervisor:  # fmt: skip
        limits = limits or Limits(max_restarts=2, hang_timeout_s=20, grace_s=3, first_delay_s=0.05)
        supervisor = Supervisor(
            self.status(steps, step),
            self.members(steps, ranks, rows=rows, **deeds),
            [self.address],
            LocalLauncher(),
            limits,
        )
        self.run_supervisor(supervisor)
        return supervisor

    def status(self, steps: int, step: int = 0) -> RunStatus:
        """The run before it is started."""
        status = RunStatus.starting(resolved_run(self.output, steps).spec, str(self.output))
        return status.model_copy(update={"step": step, "steps": steps})

    def run_supervisor(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.ending = self.supervisor.run()

    def wait(self) -> RunResult:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the supervisor did not come to an end"
        assert self.ending is not None
        return self.ending

    def until(self, condition) -> None:
        """Wait until a look at the status finds this true."""
        for _ in range(600):
            if condition(self.supervisor.status()):
                return
            assert self.ending is None, f"the run ended before: {self.ending}"
            threading.Event().wait(0.05)
        raise AssertionError(f"never came: {self.supervisor.status()}")

    def until_step(self, step: int) -> None:
        """Wait until this many steps are trained and every worker has done what it does at its start."""

        def ready(worker: WorkerStatus) -> bool:
            return worker.kind == "queue" or any(self.state.glob(f"{worker.name}.*.ready"))

        self.until(lambda s: s.step >= step and all(map(ready, s.workers)))

    def pid(self, name: str) -> int | None:
        return next(w.pid for w in self.supervisor.status().workers if w.name == name)

    def steps_done(self) -> list[int]:
        return [int(line) for line in (self.state / "steps").read_text().split()]

    def left_behind(self) -> list[str]:
        """Living processes that this run has started, and files in its socket directory."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.sockets) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(line)
        for path in self.state.glob("*.child.*"):
            pid = int(path.read_text())
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(path.name)
        return found + [path.name for path in self.sockets.iterdir()]


def alive(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
