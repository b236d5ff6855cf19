"""Control planes that die while their runs live, and those that come after them: real processes, scripted work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xtoken_services.control.runs import Runs
from xtoken_services.control.store import AttemptRow, RunRow, Store
from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.os_process import Identity

ROOT = Path(__file__).parents[3]
PLANE = Path(__file__).with_name("control_plane_script.py")
STEPS, HELD = 16, 8
DEADLINE_S = 90.0


class Planes:
    """Control planes one after the other over one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "runs").mkdir()
        self._store: Store | None = None
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Another control plane."""
        hold = ("--do", f"trainer_0:step{HELD}:always await go")
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/services", "OMP_NUM_THREADS": "1"}
        with (self.directory / f"plane.{len(self.started)}.log").open("wb") as log:
            command = [sys.executable, str(PLANE), str(self.directory), str(STEPS), *hold, *arguments]
            self.started.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
        return self.started[-1]

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.directory.glob("plane.*.log")))

    @property
    def store(self) -> Store:
        """The database, from beside."""
        self.until(lambda: (self.directory / "runs" / ".control.sqlite3").exists())
        self._store = self._store or Store(self.directory / "runs")
        return self._store

    def run(self) -> RunRow:
        """The only run."""
        self.until(lambda: bool(self.store.page(1)))
        found = self.store.run(self.store.page(1)[0]["id"])
        assert found is not None
        return found

    def last(self) -> dict[str, AttemptRow]:
        """The last start of every worker."""
        return {attempt.worker: attempt for attempt in self.store.attempts(self.run().id)}

    def pid(self, worker: str) -> int:
        return int(self.last()[worker].identity["pid"])  # type: ignore[index]

    def steps(self) -> list[int]:
        file = self.directory / "state" / "steps"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def notes(self) -> str:
        return "\n".join(f"{note.worker} {note.message}" for note in self.store.notes(self.run().id))

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"it never came: {self.said()}"
            time.sleep(0.02)

    def until_trained(self, steps: int) -> None:
        self.until(lambda: len(self.steps()) >= steps)

    def until_completed(self) -> None:
        """Take no more than that from the trainer than it is told to wait for."""
        (self.directory / "state" / "go").touch()
        self.until(lambda: self.run().state == "completed")

    def begin_and_kill(self) -> None:
        """A control plane that is killed when its run has taken some steps; the trainer waits at a later one."""
        first = self.start("--start")
        self.until_trained(3)
        first.kill()
        first.wait()

    def take_over(self) -> None:
        """Another one, until it has looked what is there."""
        self.start()
        self.until(lambda: "recovered" in self.notes())


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[Planes]:
    found = Planes(tmp_path)
    try:
        yield found
        for plane in found.started:
            plane.wait(DEADLINE_S)
        run = found.run()
        assert os_process.marked(f"{run.id}/") == [], "processes are left"
        assert run.queue is None or not Path(run.queue["private"]).exists()
    finally:
        for plane in found.started:
            plane.kill()
        if found._store is not None:
            for row in found.store.page(10):
                os_process.kill_marked(f"{row['id']}/")
            found.store.close()


def dead(pid: int) -> bool:
    found = os_process.identify(pid)
    return found is None or not found.alive


ALL_WORKERS = "recovered: queue, collator-0, teacher-0-0, trainer-0"


def test_killed_control_plane(planes: Planes) -> None:
    planes.begin_and_kill()
    before = {name: attempt.identity for name, attempt in planes.last().items()}
    planes.until_trained(HELD)  # training goes on with nobody to look after it
    planes.take_over()
    planes.until_completed()
    assert planes.steps() == list(range(STEPS))
    assert {name: attempt.identity for name, attempt in planes.last().items()} == before, "nothing was started twice"
    assert ALL_WORKERS in planes.notes()
    assert {name: a.exit_code for name, a in planes.last().items()} == dict.fromkeys(before, 0)


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["collator-0", "teacher-0-0", "trainer-0"])
def test_worker_killed_without_control_plane(planes: Planes, worker: str) -> None:
    planes.begin_and_kill()
    pid = planes.pid(worker)
    os.kill(pid, signal.SIGKILL)
    planes.until(lambda: dead(pid))
    planes.take_over()
    planes.until(lambda: planes.last()[worker].incarnation == 2)  # the rest of the run may not take as long as that
    planes.until_completed()
    assert sorted(set(planes.steps())) == list(range(STEPS))
    assert f"{worker} exited with unknown status" in planes.notes()


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["queue", "trainer-0"])
def test_worker_killed_after_recovery(planes: Planes, worker: str) -> None:
    planes.begin_and_kill()
    planes.take_over()
    os.kill(planes.pid(worker), signal.SIGKILL)
    planes.until_completed()
    assert sorted(set(planes.steps())) == list(range(STEPS))
    assert planes.last()[worker].incarnation == 2


@pytest.mark.slow
def test_detached_run(planes: Planes) -> None:
    assert planes.start("--start", "--leave").wait(DEADLINE_S) == 0, planes.said()
    assert planes.run().state == "running"
    planes.until_trained(HELD)
    planes.take_over()
    planes.until_completed()
    assert planes.steps() == list(range(STEPS))
    assert ALL_WORKERS in planes.notes()


@pytest.mark.slow
def test_run_completed_without_control_plane(planes: Planes) -> None:
    planes.begin_and_kill()
    (planes.directory / "state" / "go").touch()
    planes.until(lambda: dead(planes.pid("trainer-0")))
    planes.start().wait(DEADLINE_S)
    assert planes.run().state == "completed"
    assert planes.last()["trainer-0"].exit_code == 0


@pytest.mark.slow
def test_run_without_processes_is_interrupted(planes: Planes) -> None:
    planes.begin_and_kill()
    os_process.kill_marked(f"{planes.run().id}/")
    planes.until(lambda: os_process.marked(f"{planes.run().id}/") == [])
    planes.start().wait(DEADLINE_S)
    run = planes.run()
    assert run.state == "interrupted"
    assert (
        run.error.startswith("all processes exited while no control plane was running (") and "trainer-0" in run.error
    )
    assert all(attempt.ended for attempt in planes.last().values())


@pytest.mark.slow
def test_stop_is_continued(planes: Planes) -> None:
    planes.begin_and_kill()
    planes.store.change(planes.run().id, state="stopping")
    planes.start().wait(DEADLINE_S)
    assert planes.run().state == "stopped"


@pytest.mark.slow
def test_directory_lock(planes: Planes) -> None:
    planes.start("--start")
    planes.until_trained(1)
    assert planes.start().wait(DEADLINE_S) != 0
    assert "another control plane serves the runs in" in planes.said()
    planes.until_completed()


@pytest.mark.slow
def test_unrecorded_process_is_found_by_its_mark(planes: Planes) -> None:
    planes.begin_and_kill()
    pid = planes.pid("teacher-0-0")
    planes.store.change_attempt(planes.run().id, "teacher-0-0", 1, identity=None)
    planes.take_over()
    planes.until_completed()
    assert ALL_WORKERS in planes.notes()
    assert dead(pid)


def test_reused_pid() -> None:
    own = os_process.identify(os.getpid())
    assert own is not None and own.alive
    other = Identity(own.pid, own.ticks - 1, own.boot, own.namespace)
    elsewhere = Identity(own.pid, own.ticks, "another boot", own.namespace)
    for wrong in (other, elsewhere):
        assert not wrong.alive
        assert os_process.open_pidfd(wrong) is None
    handle = os_process.open_pidfd(own)
    assert handle is not None
    os.close(handle)


def test_failure_counts_continue(tmp_path: Path) -> None:
    from xtoken_services.supervisor.process_group import RestartPolicy

    for step, restarts in ((5, False), (6, True)):
        policy = RestartPolicy(2)
        policy.failures, policy.highest_step = 2, 5
        assert (policy.record_failure(step) is not None) is restarts


def test_close_releases_the_lock(tmp_path: Path) -> None:
    for _ in range(2):
        Runs(tmp_path / "runs").close()
