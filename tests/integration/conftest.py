"""Runs of real processes, and what must be gone after each."""

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.forks import ForkLauncher
from tests.support.tiny_run import RUN_NAME, TinyAssets, make_assets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_services.cli.app import main
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunStatus
from xtoken_services.supervisor.launchers.local import LocalLauncher
from xtoken_services.supervisor.process_spec import build_process_specs
from xtoken_services.supervisor.run_record import RunResult, RunState
from xtoken_services.supervisor.supervisor import Limits, Supervisor

DEADLINE_S = 240.0


class Crew:
    """The processes of one run under their supervisor, in a thread of the test.

    Args:
        spec: The run.
        launcher: Starts its processes, and is closed by its owner; None: one of the run's own.
    """

    def __init__(self, spec: RunSpec, launcher: LocalLauncher | None = None) -> None:
        self.spec = spec
        self.sockets = Path(tempfile.mkdtemp(prefix="xtoken-test-"))
        resolved = resolve_run(spec)
        file = spec.output / "resolved.json"
        file.write_text(resolved.model_dump_json(), encoding="utf-8")
        queues = [Address.parse(f"ipc://{self.sockets}/queue-{node}") for node in range(spec.workers.nodes)]
        self._own_launcher = launcher is None
        self.launcher = launcher or LocalLauncher(tied=True)
        self.supervisor = Supervisor(
            RunStatus.starting(spec, str(spec.output)).model_copy(update={"steps": resolved.steps}),
            build_process_specs(resolved, file, queues),
            queues,
            self.launcher,
            Limits(max_restarts=spec.workers.max_restarts, first_delay_s=0.05),
        )
        self.ending: RunResult | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.ending = self.supervisor.run()

    def pid(self, name: str) -> int:
        """The process id of a worker by its name, once it runs."""
        found: list[int] = []

        def running() -> bool:
            found[:] = [w.pid for w in self.supervisor.status().workers if w.name == name and w.pid]
            return bool(found)

        self.wait(running)
        return found[0]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; fails if the run ends before."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self._thread.is_alive(), f"the run ended early: {self.ending}"
            assert time.monotonic() < deadline, "the condition never held"
            time.sleep(0.01)

    def wait_for_steps(self, count: int) -> None:
        """Until so many steps are taken."""
        self.wait(lambda: len(steps_of(self.spec.output)) >= count)

    def kill(self, name: str) -> None:
        """SIGKILL a worker, by the pid that its supervisor knows."""
        psutil.Process(self.pid(name)).kill()

    def join(self) -> RunResult:
        """The run's end."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the run does not end"
        assert self.ending is not None
        return self.ending

    def complete(self, positions: int | None = None) -> list[dict[str, Any]]:
        """The steps of a run that must be completed; they train each of so many positions once and in order."""
        ending, steps = self.join(), steps_of(self.spec.output)
        assert ending.state == RunState.COMPLETED, ending.error
        assert positions is None or [i for line in steps for i in line["ids"]] == list(range(positions))
        return steps

    def stop(self) -> RunResult:
        """Stop it in order."""
        self.supervisor.stop()
        return self.join()

    def close(self) -> None:
        """Nothing of it may be left."""
        if self._thread.is_alive():
            self.supervisor.stop(now=True)
            self._thread.join(60)
        if self._own_launcher:
            self.launcher.close()
        left = list(self.sockets.iterdir())
        shutil.rmtree(self.sockets)
        assert left == [], f"sockets are left: {left}"


Start = Callable[..., Crew]
Refusal = Callable[..., str]


@dataclass(frozen=True)
class Tiny:
    """Tiny runs of one test: what they read, where they write, and what starts them."""

    assets: TinyAssets
    path: Path
    start: Start

    def spec(self, name: str = "", **changes: Any) -> RunSpec:
        """A run in the test's directory, or in one of this name in it."""
        return tiny_spec(self.assets, self.path / name, **changes)


@pytest.fixture
def tiny(assets: TinyAssets, tmp_path: Path, start: Start) -> Tiny:
    return Tiny(assets, tmp_path, start)


def command_of(process: psutil.Process) -> str:
    """A process's command line; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 256 KiB; where this user may not mount one, the test is skipped."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


PLANTED = ("json", "numpy", "safetensors", "sentencepiece", "tokenizers", "torch", "transformers", "xtoken_core")


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Path]:
    """A working directory with files named as modules that a run imports: none of them is executed."""
    directory, executed = tmp_path / "planted", tmp_path / "executed"
    directory.mkdir()
    for name in PLANTED:
        (directory / f"{name}.py").write_text(f"open({str(executed)!r}, 'a').write({name + ' '!r})\n")
    yield directory
    assert not executed.exists(), executed.read_text()


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> TinyAssets:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[RunSpec], Crew]]:
    """Start runs; at the end no process and no shared memory of theirs may be left."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    crews: list[Crew] = []

    def make(spec: RunSpec, launcher: LocalLauncher | None = None) -> Crew:
        crews.append(Crew(spec, launcher))
        return crews[-1]

    yield make
    for crew in crews:
        crew.close()
    children = [p for p in psutil.Process().children(recursive=True) if "xtoken_services.cli" in command_of(p)]
    assert children == [], f"processes are left: {children}"
    left = [path for path in Path("/dev/shm").iterdir() if RUN_NAME in path.name]
    assert left == [], f"shared memory is left: {left}"


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return the one line of the error of `xtoken`, run in this process; a traceback or a zero exit fails."""

    def refusal(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["xtoken", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert left.value.code != 0, said.out
        assert "Traceback" not in said.err + said.out
        lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, said.err
        return lines[0]

    return refusal


@pytest.fixture(scope="session")
def forking() -> Iterator[ForkLauncher]:
    """A launcher that forks workers from one process, as `xtoken run` does: they import nothing themselves."""
    launcher = ForkLauncher()
    yield launcher
    launcher.close()
