"""A run without a control plane: what ends it, what does not, and the record of its end."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.supervisor.scripted_run import resolved_run, use_scripted_workers
from tests.unit.supervisor.test_progress import Broken
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_services.common.files.directory_lock import sole_owner
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor import local_run
from xtoken_services.supervisor import run as run_module
from xtoken_services.supervisor.local_run import run_locally
from xtoken_services.supervisor.progress import ProgressView

Scripted = Callable[..., RunSpec]


@pytest.fixture
def scripted_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """Make a specification whose run has scripted workers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    temporary = tempfile.mkdtemp(prefix="xtoken-test-")
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    state = tmp_path / "state"
    state.mkdir()

    def make(steps: int, **deeds: list[str]) -> RunSpec:
        use_scripted_workers(state, steps, monkeypatch.setattr, **deeds)
        return resolved_run(tmp_path / "out", steps).spec

    yield make
    shutil.rmtree(temporary)


def record(spec: RunSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((spec.output / "run.json").read_text())
    return found


def steps_done(tmp_path: Path) -> int:
    file = tmp_path / "state" / "steps"
    return len(file.read_text().split()) if file.exists() else 0


def test_broken_display_does_not_end_the_run(
    scripted_spec: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def broken(show: bool, **_: Any) -> Iterator[ProgressView]:
        yield Broken()

    monkeypatch.setattr(local_run, "open_view", broken)
    result = run_locally(scripted_spec(20))
    assert (result.state, result.error, result.exit_code) == (RunState.COMPLETED, "", 0)
    assert steps_done(tmp_path) == 20


def test_run_that_cannot_be_followed_is_stopped_gracefully(
    scripted_spec: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(*_: Any) -> None:
        while steps_done(tmp_path) < 2:
            time.sleep(0.05)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(local_run, "follow", follow)
    spec = scripted_spec(1000, trainer_0=["start:linger 0.5"])
    with pytest.raises(RuntimeError, match="a mistake"):
        run_locally(spec, show=False)
    assert record(spec)["state"] == "stopped"
    assert (tmp_path / "state" / "trainer-0.left").exists(), "the trainer was given the time to write a checkpoint"


@pytest.mark.parametrize("earlier", [None, {"state": "completed", "run": "an-earlier-life"}], ids=["new", "finished"])
def test_refused_start_keeps_an_earlier_record(
    scripted_spec: Scripted, monkeypatch: pytest.MonkeyPatch, earlier: dict[str, Any] | None
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("student.model: there is no such directory")

    spec = scripted_spec(2)
    monkeypatch.setattr(run_module, "resolve_here", refuse)
    if earlier is not None:
        spec.output.mkdir()
        (spec.output / "run.json").write_text(json.dumps(earlier))
    with pytest.raises(Exception, match="there is no such directory"):
        run_locally(spec, show=False)
    if earlier is None:
        assert not spec.output.exists(), "a failed check leaves no directory"
    else:
        assert record(spec) == earlier


@pytest.mark.parametrize("refusal", ["another run is writing to", "no such setting"])
def test_refused_start_keeps_the_cache_of_an_active_run(
    scripted_spec: Scripted, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("no such setting")

    spec = scripted_spec(2)
    (spec.output / "cache" / "index").mkdir(parents=True)
    if refusal == "no such setting":
        monkeypatch.setattr(local_run, "check_launch", refuse)
    with sole_owner(spec.output), pytest.raises(XtokenError, match=refusal):
        run_locally(spec, show=False)
    assert (spec.output / "cache" / "index").is_dir()


def test_refused_start_empties_a_directory_that_was_there_before(
    scripted_spec: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("no such setting")

    spec = scripted_spec(2)
    monkeypatch.setattr(run_module, "resolve_here", refuse)
    for there in (None, spec.output, spec.output / "cache" / "index"):
        if there is not None:
            there.mkdir(parents=True)
        with pytest.raises(ConfigError, match="no such setting"):
            run_locally(spec, show=False)
        assert spec.output.exists() == (there is not None) and not list(spec.output.glob("*"))
        if there is not None:
            spec.output.rmdir()


def test_a_run_directory_is_private_and_one_that_others_may_write_is_warned_about(
    scripted_spec: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    spec = scripted_spec(2)
    assert run_locally(spec, show=False).exit_code == 0
    assert spec.output.stat().st_mode & 0o777 == 0o700
    assert "others may change" not in caplog.text
    shutil.rmtree(spec.output)
    spec.output.mkdir()
    spec.output.chmod(0o777)
    assert run_locally(spec, show=False).exit_code == 0
    assert "is open to other users (mode 0777): others may change what the run reads again" in caplog.text


def test_status_has_the_fields_of_the_control_plane(
    scripted_spec: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    from xtoken_services.common.run.status import RunStatus, WorkerStatus

    assert run_locally(scripted_spec(4), as_json=True).exit_code == 0
    for line in capsys.readouterr().out.splitlines():
        status = json.loads(line)
        assert list(status) == list(RunStatus.model_fields)
        RunStatus.model_validate(status)
        assert all(set(worker) == set(WorkerStatus.model_fields) for worker in status["workers"])
