"""Teachers and trainers killed at random moments: the other one says so, they pair again, and nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.bounds import resume_bounds
from benchmarks.worker_kills.__main__ import kill_repeatedly
from benchmarks.worker_kills.whole_run import compare
from tests.support.tiny_run import make_assets, tiny_spec
from xtoken_core.config.spec import RunSpec

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_runs_whose_workers_are_killed_go_on(tmp_path: Path, device: str) -> None:
    runs, kills = (1, 4) if device == "cpu" else (3, 12)
    outcome = kill_repeatedly(tmp_path, runs=runs, rounds=kills, kills=kills, device=device)
    assert outcome.errors == []
    assert outcome.holds(), outcome.summary()
    assert len(outcome.kills) >= kills


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_run_trains_what_an_undisturbed_one_does(tmp_path: Path, device: str) -> None:
    assets = make_assets(tmp_path / "assets", layers=2)

    def spec_of(directory: Path, checkpoint_every: int) -> RunSpec:
        workers: dict[str, Any] = {"collators": 1, "device": device, "max_restarts": 100}
        train = {"checkpoint_every": checkpoint_every, "samples_per_step": 8, "micro_batch_tokens": 320}
        return tiny_spec(
            assets, directory, records=8 * (1600 if device == "cuda" else 800), train=train, workers=workers
        )

    result = compare(spec_of, tmp_path, kills=2, checkpoint_every=4)
    assert result["same_ids_in_order"]
    assert result["each_id_once"]
    if device == "cpu":
        assert result["difference"]["largest"] == result["noise"]["largest"] == 0.0
    assert [bound.what for bound in resume_bounds(result) if not bound.holds] == [], result
