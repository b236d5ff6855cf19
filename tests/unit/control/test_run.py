"""One run under a control plane of its own: what ends it, what does not, and what is written down of its end."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.control import client as client_module
from services.control import run as run_module
from services.control.client import run_in_place
from services.control.runs import Runs
from services.supervisor.progress import Watch
from services.supervisor.run_record import RunState
from tests.unit.supervisor.scripted_run import resolved_run, scripted_members
from tests.unit.supervisor.test_progress import Broken
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError

Scripted = Callable[..., RunSpec]


@pytest.fixture
def scripted_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """Makes a specification whose run has scripted workers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    temporary = tempfile.mkdtemp(prefix="xtoken-test-")
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    state = tmp_path / "state"
    state.mkdir()

    def make(steps: int, **deeds: list[str]) -> RunSpec:
        def members(resolved: Any, _file: Path, addresses: Any) -> Any:
            return scripted_members(resolved.spec.output, state, addresses[0], steps, **deeds)

        def resolve(spec: RunSpec, _progress: Any = None) -> Any:
            return resolved_run(spec.output, steps).model_copy(update={"spec": spec})

        monkeypatch.setattr(run_module, "resolve_run", resolve)
        monkeypatch.setattr(run_module, "fleet_of", members)
        return resolved_run(tmp_path / "out", steps).spec

    yield make
    shutil.rmtree(temporary)


def record(spec: RunSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((spec.output / "run.json").read_text())
    return found


def steps_done(tmp_path: Path) -> int:
    file = tmp_path / "state" / "steps"
    return len(file.read_text().split()) if file.exists() else 0


def test_a_display_that_fails_does_not_end_the_run(
    scripted_spec: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def broken(show: bool, **_: Any) -> Iterator[Watch]:
        yield Broken()

    monkeypatch.setattr(client_module, "watch_for", broken)
    outcome = run_in_place(scripted_spec(20))
    assert (outcome.state, outcome.error, outcome.exit_code) == (RunState.COMPLETED, "", 0)
    assert steps_done(tmp_path) == 20


def test_a_run_that_cannot_be_followed_is_stopped_in_order(
    scripted_spec: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(*_: Any) -> None:
        while steps_done(tmp_path) < 2:
            time.sleep(0.05)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(client_module, "follow", follow)
    spec = scripted_spec(1000, trainer_0=["start:linger 0.5"])
    with pytest.raises(RuntimeError, match="a mistake"):
        run_in_place(spec, show=False)
    assert record(spec)["state"] == "stopped"
    assert (tmp_path / "state" / "trainer-0.left").exists(), "the trainer was given the time to write a checkpoint"


def test_a_stop_that_had_to_kill_a_trainer_is_written_down(scripted_spec: Scripted, tmp_path: Path) -> None:
    spec = scripted_spec(1000, trainer_0=["start:deaf"])
    workers = spec.workers.model_copy(update={"stop_timeout_s": 1.0})
    runs = Runs(tmp_path / "runs")
    try:
        run, row = runs.start(spec.model_copy(update={"workers": workers}))
        assert run is not None
        while steps_done(tmp_path) < 2:
            assert not run.over.wait(0.05), run.status()
        runs.stop(row.id)
        run.join()
        lost = "trainer-0 did not leave within 1 s (workers.stop_timeout_s): what was trained since"
        told = runs.store.run(row.id)
        assert told is not None
        assert (told.state, told.exit_code) == ("stopped", 130)
        assert told.error.startswith(lost)
        assert [note.message for note in runs.store.notes(row.id)][-1] == f"stopped: {told.error}"
    finally:
        runs.stop_all(now=True)
        runs.join()
        runs.close()


@pytest.mark.parametrize("earlier", [None, {"state": "completed", "run": "an-earlier-life"}], ids=["new", "finished"])
def test_a_refused_start_leaves_the_record_of_an_earlier_life(
    scripted_spec: Scripted, monkeypatch: pytest.MonkeyPatch, earlier: dict[str, Any] | None
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("student.model: there is no such directory")

    spec = scripted_spec(2)
    monkeypatch.setattr(run_module, "resolve_run", refuse)
    if earlier is not None:
        spec.output.mkdir()
        (spec.output / "run.json").write_text(json.dumps(earlier))
    with pytest.raises(Exception, match="there is no such directory"):
        run_in_place(spec, show=False)
    refused = {"state": "failed", "error": "student.model: there is no such directory", "exit_code": 2}
    assert record(spec) == (earlier or refused)
