"""A real queue with a run, real collator processes on it, and nobody who trains."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.contract.processes import ROOT, UP_S, ipc_address, start_queue
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.run_client import RunClient
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.queue.run.names import TRAINER
from xtoken_services.common.run.resolve import resolve_run

DEADLINE_S = 900.0


class CollatorCrew:
    """Collators of one run; this process holds the trainer's session, which alone may read and drop rows.

    Attributes:
        run: The run's calls.
        rewinds: What the calls of a trainer name.
        positions: Of the whole run.
    """

    def __init__(self, spec: RunSpec) -> None:
        resolved = resolve_run(spec)
        self.positions, self.samples_per_step = resolved.positions, spec.train.samples_per_step
        self._directory = Path(tempfile.mkdtemp(prefix="xc-"))
        file = self._directory / "resolved.json"
        file.write_text(resolved.model_dump_json(), encoding="utf-8")
        address = ipc_address(self._directory / "s")
        self._url = address.url
        self._log = (self._directory / "log").open("wb")
        self._queue = start_queue(address, "--run", str(file), stderr=self._log)
        self._collators: dict[str, subprocess.Popen[bytes]] = {}
        self._client = TaskClient(ZmqTransport(address, patience_s=UP_S))
        self._client.hello("watcher", TRAINER, incarnation=time.time_ns(), silence_s=DEADLINE_S, needs_run=True)
        self.run = RunClient(self._client)
        self.rewinds = self.run.rewind(0, {}, {})

    def start(self, name: str) -> None:
        """Add a collator; one of the same name is replaced in the queue's eyes."""
        command = [sys.executable, "-m", "xtoken_services.cli", "collator", "--queue", self._url, "--name", name]
        self._collators[name] = subprocess.Popen(command, cwd=ROOT, stderr=self._log)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a collator that runs."""
        assert self._collators[name].poll() is None, f"{name} has ended: {self.log()[-2000:]}"
        self._collators[name].send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL a collator that runs."""
        self.signal(name, signal.SIGKILL)
        self._collators.pop(name).wait()

    def ended(self, name: str) -> int:
        """The exit status of a collator that ends by itself."""
        return self._collators[name].wait(DEADLINE_S)

    def failed(self) -> str:
        """Why the queue has given the run up; empty if it has not."""
        return str(self._client.stats()["partitions"][self._client.partition]["run"]["failed"])

    def rows_put(self) -> int:
        """Rows that the queue has taken so far."""
        return int(self._client.stats()["partitions"][self._client.partition]["rows_put"])

    def running(self) -> set[str]:
        """Names of the collators that have come as far as their main loop."""
        return {s["name"] for s in self._client.stats()["sessions"] if s["phase"] == "run"}

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"the condition never held: {self.log()[-2000:]}"
            time.sleep(0.02)

    def discard(self) -> None:
        """Drop every row and go on behind them, as a trainer does that starts from a later checkpoint."""
        self.rewinds = self.run.rewind(self.rows_done() // self.samples_per_step + 1, {}, {})

    def rows_done(self) -> int:
        """The lowest position that no collator has been given yet."""
        step = int(self._client.stats()["partitions"][self._client.partition]["run"]["step"])
        held = int(self._client.stats()["partitions"][self._client.partition]["samples"])
        return step * self.samples_per_step + held

    def cpu_s(self, name: str | None = None) -> float:
        """CPU seconds that a collator, or else the queue, has taken so far."""
        process = self._queue if name is None else self._collators[name]
        after_name = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    def log(self) -> str:
        """What the processes have said."""
        self._log.flush()
        return (self._directory / "log").read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End every process."""
        for process in self._collators.values():
            process.kill()
            process.wait()
        self._client.bye()
        self._client.close()
        self._queue.terminate()
        self._queue.wait(UP_S)
        self._log.close()
        shutil.rmtree(self._directory)
