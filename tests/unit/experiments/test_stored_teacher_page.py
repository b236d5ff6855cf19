"""The tables of stored teachers in `docs/operations.md`."""

from __future__ import annotations

import json
import tomllib

import pytest

from experiments.stored_teacher import page
from experiments.stored_teacher.__main__ import SIZES, quality_jobs


def test_the_page_has_the_tables_of_its_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written() == text, "run: python -m experiments.stored_teacher.page"


def test_predictions_are_about_runs_of_the_experiment() -> None:
    names = {job.name for job in quality_jobs(["chain"], 60, "cpu", 12)}
    names |= {f"stored-{kind}" for kind in ("living-logits", "again-topk", "again-hidden")}
    predictions = tomllib.loads(page.PREDICTIONS.read_text(encoding="utf-8"))["prediction"]
    for made in predictions:
        assert {made[key] for key in ("run", "less", "of") if key in made} <= names


@pytest.mark.parametrize("k", SIZES)
def test_a_run_of_largest_logits_differs_in_its_teacher_alone(k: int) -> None:
    whole, *largest = (tomllib.loads(job.file) for job in quality_jobs(["chain"], 60, "cpu", 12))
    run = largest[SIZES.index(k)]
    assert run["teacher"][0] == whole["teacher"][0] | {"content": "topk", "topk": k}
    assert run | {"teacher": 0, "name": "", "output": ""} == whole | {"teacher": 0, "name": "", "output": ""}


def test_differences_are_above_whole_logits() -> None:
    run = {"steps": 3, "samples_per_step": 12, "loss": 1.0, "curve": [{page.TEST: 1.25}]}
    runs = {"stored-chain-whole": run, "stored-chain-64": run | {"curve": [{page.TEST: 1.5}]}}
    result = {"machine": {"gpus": [], "torch": "2"}, "learning_rate": 1e-4, "runs": runs, "builds": {}}
    shown = page.render(json.loads(json.dumps(result)))
    assert "| chain | 64 largest | 3 | 1.0000 | 1.5000 | +0.2500 |" in shown
    assert "| 64 largest: bits per byte above whole logits | -0.005 to 0.012 | 0.2500 | **not** |" in shown
