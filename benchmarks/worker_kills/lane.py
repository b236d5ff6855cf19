"""One run under its supervisor, from outside: its workers' numbers, what they log, how far it is."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunStatus
from xtoken_services.supervisor.launchers.base import Launcher
from xtoken_services.supervisor.process_spec import build_process_specs
from xtoken_services.supervisor.run_record import RunResult
from xtoken_services.supervisor.supervisor import Limits, Supervisor

Victim = Literal["teacher-0-0", "trainer-0"]
VICTIMS: tuple[Victim, ...] = ("teacher-0-0", "trainer-0")
OPEN = "of the teacher is open"
GONE: dict[Victim, tuple[str, ...]] = {
    "teacher-0-0": ("the teacher has ended: ring",),
    "trainer-0": ("is closed: one of its two sessions has ended",),
}
"""What the other one logs of a victim's end."""
LOOK_S = 0.02


@dataclass
class Kill:
    """One kill and what followed; seconds since the kill.

    Attributes:
        paired: Whether the two sessions were a pair, and trained; otherwise one of them was still on its way.
        step: The step that the run stood at.
        reported_s: Until the other one's log reported it; None where it was no pair, or never did.
        paired_s: Until the two sessions of the run were a pair again and a step was taken.
    """

    victim: Victim
    paired: bool
    step: int
    reported_s: float | None = None
    paired_s: float | None = None


class Lane:
    """A run, in threads of this process.

    Args:
        spec: The run; its output must be empty.
        launcher: Starts its processes.
        seed: Of what is killed when.
    """

    def __init__(self, spec: RunSpec, launcher: Launcher, seed: int) -> None:
        self.spec, self.rng = spec, random.Random(seed)
        self.kills: list[Kill] = []
        self.ending: RunResult | None = None
        self._sockets = Path(tempfile.mkdtemp(prefix="xtoken-kills-"))
        resolved = resolve_run(spec)
        spec.output.mkdir(parents=True, exist_ok=True)
        file = spec.output / "resolved.json"
        file.write_text(resolved.model_dump_json(), encoding="utf-8")
        queue = Address.parse(f"ipc://{self._sockets}/queue")
        limits = Limits(max_restarts=spec.workers.max_restarts, first_delay_s=0.0)
        self.supervisor = Supervisor(
            RunStatus.starting(spec, str(spec.output)).model_copy(update={"steps": resolved.steps}),
            build_process_specs(resolved, file, [queue]),
            [queue],
            launcher,
            limits,
        )
        self._reports_before = self._opened_before = 0
        self._killed_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"lane {seed}")
        self._thread.start()

    def _run(self) -> None:
        self.ending = self.supervisor.run()

    @property
    def running(self) -> bool:
        """Return whether the run has not ended yet."""
        return self._thread.is_alive()

    def kill(self, victim: Victim, *, paired: bool) -> Kill:
        """Send SIGKILL to a worker."""
        done = Kill(victim, paired, self.step())
        pid = self.wait(lambda: self.pid(victim))
        self._reports_before = self._reports(victim)
        os.kill(pid, signal.SIGKILL)
        self._killed_at = time.monotonic()
        self._opened_before = self._count("trainer-0", (OPEN,))
        self.kills.append(done)
        return done

    def await_report(self, done: Kill) -> None:
        """Wait until the other one has reported that the victim of this kill, the last one, is gone.

        Raises:
            RuntimeError: It never does, or the run ends.
        """
        self.wait(lambda: self._reports(done.victim) > self._reports_before)
        done.reported_s = time.monotonic() - self._killed_at

    def await_pair(self, done: Kill) -> None:
        """Wait until, after this kill, the last one, the sessions are a pair again and have taken a step.

        Raises:
            RuntimeError: They never do, or the run ends.
        """
        self.wait(lambda: self._count("trainer-0", (OPEN,)) > self._opened_before)
        began, line = time.time(), self.last_line()
        self.wait(lambda: self.last_line() != line and self.last_line().get("time", 0.0) > began)
        done.paired_s = time.monotonic() - self._killed_at

    def paired(self, seconds: float = 90.0) -> None:
        """Wait for the first step."""
        self.wait(lambda: bool(self.last_line()), seconds)

    def wait(self, condition: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Wait for a condition and return its first true value.

        Raises:
            RuntimeError: It never does, or the run ends before.
        """
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if not self.running:
                raise RuntimeError(f"{self.spec.output}: the run has ended: {self.ending}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.spec.output}: nothing happened for {seconds:g} s; kills: {self.kills[-3:]}")
            time.sleep(LOOK_S)
        return found

    def step(self) -> int:
        """Return the last step that was taken; -1 before the first."""
        return int(self.last_line().get("step", -1))

    def last_line(self) -> dict[str, Any]:
        """Return the last whole line of `steps.jsonl`."""
        try:
            with (self.spec.output / "steps.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 14)))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return {}
        return dict(json.loads(lines[-2])) if len(lines) > 2 or (len(lines) == 2 and lines[0]) else {}

    def join(self, seconds: float) -> RunResult:
        """Wait for the run's end and return it.

        Raises:
            RuntimeError: It does not end.
        """
        self._thread.join(seconds)
        if self.running or self.ending is None:
            raise RuntimeError(f"{self.spec.output}: the run does not end")
        return self.ending

    def close(self) -> None:
        """End it, if it has not ended."""
        if self.running:
            self.supervisor.stop(now=True)
            self._thread.join(60)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def pid(self, name: str) -> int:
        """Return the process id of a worker; 0 while it does not run."""
        return next((w.pid for w in self.supervisor.status().workers if w.name == name and w.pid), 0)

    def _reports(self, victim: Victim) -> int:
        other = VICTIMS[1 - VICTIMS.index(victim)]
        return self._count(other, GONE[victim])

    def _count(self, name: str, texts: tuple[str, ...]) -> int:
        """Return how often a worker has logged any of these, in all its attempts."""
        logs = (self.spec.output / "logs").glob(f"{name}.*.log")
        return sum(log.read_text(encoding="utf-8", errors="replace").count(text) for log in logs for text in texts)


def trained_ids(output: Path) -> list[int]:
    """Return the ids of all lines of a run's `steps.jsonl`, in their order."""
    lines = (output / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return [i for line in lines for i in json.loads(line)["ids"]]
