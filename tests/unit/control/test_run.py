"""A run of the control plane that is stopped, and what the database says of it."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.supervisor.scripted_run import resolved_run, use_scripted_workers
from xtoken_services.control.runs import Runs
from xtoken_services.supervisor import run as run_module


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Yield the runs of a control plane, whose workers are to be scripted in `state`; stop them afterwards."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sockets = tempfile.mkdtemp(prefix="xtoken-test-")
    monkeypatch.setattr(tempfile, "tempdir", sockets)
    (tmp_path / "state").mkdir()
    found = Runs(tmp_path / "runs")
    try:
        yield found
    finally:
        found.stop_all(now=True)
        found.join()
        found.close()
        shutil.rmtree(sockets)


def test_killing_a_trainer_during_shutdown_is_recorded(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    use_scripted_workers(state, 1000, monkeypatch.setattr, trainer_0=["start:deaf"])
    resolved = resolved_run(tmp_path / "out", 1000)
    spec, lines = resolved.spec, ["text: 1 record", "rows are padded", "disk: 2 GiB"]
    monkeypatch.setattr(run_module, "resolve_here", lambda run: (resolved.model_copy(update={"spec": run.spec}), lines))
    workers = spec.workers.model_copy(update={"stop_timeout_s": 1.0})
    run, row = runs.start(spec.model_copy(update={"workers": workers}))
    steps = state / "steps"
    while not steps.exists() or len(steps.read_text().split()) < 2:
        assert not run.over.wait(0.05), run.status()
    runs.stop(row.id)
    run.join()
    lost = "trainer-0 did not exit within 1 s (workers.stop_timeout_s): progress since"
    ended = runs.store.run(row.id)
    assert (ended.state, ended.exit_code) == ("stopped", 130)
    assert ended.error.startswith(lost)
    notes = [note.message for note in runs.store.notes(row.id)]
    assert notes[-1] == f"stopped: {ended.error}"
    assert notes[:2] == ["text: 1 record\ndisk: 2 GiB", "rows are padded"], "all sizes are one entry"


def test_a_run_that_has_ended_early_has_taken_the_steps_of_its_summary(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_scripted_workers(tmp_path / "state", 4, monkeypatch.setattr)
    spec = resolved_run(tmp_path / "out", 4).spec
    spec.output.mkdir()
    (spec.output / "summary.json").write_text('{"steps": 2, "stopped_early": "no better"}')
    run, row = runs.start(spec)
    run.join()
    status, ended = run.status(), runs.store.run(row.id)
    assert ended is not None and ended.state == "completed", ended
    assert (ended.step, ended.steps) == (status.step, status.steps) == (2, 4)
