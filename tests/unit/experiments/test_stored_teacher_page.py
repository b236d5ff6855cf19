"""The tables of stored teachers in `docs/operations.md`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.real.results import OtherTextError
from experiments.stored_teacher import page
from experiments.stored_teacher.__main__ import SIZES, collect, quality_jobs
from experiments.stored_teacher.merging import merged
from experiments.stored_teacher.producer import measure, token_ids
from tests.support.tiny_run import documents, make_assets, write_jsonl


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


def test_differences_are_above_whole_logits_at_the_last_step_of_both() -> None:
    run = {"steps": 3, "samples_per_step": 12, "loss": 1.0, "curve": [{"step": 2, page.TEST: 1.25}]}
    longer = [{"step": 2, page.TEST: 1.5}, {"step": 3, page.TEST: 1.375}]
    runs = {"stored-chain-whole": run, "stored-chain-64": run | {"curve": longer}}
    result = {"machine": {"gpus": [], "torch": "2"}, "learning_rate": 1e-4, "runs": runs, "builds": {}}
    shown = page.render(json.loads(json.dumps(result)))
    assert "| chain | whole logits | 3 | 1.0000 | 1.2500 | |  |" in shown
    assert "| chain | 64 largest | 3 | 1.0000 | 1.5000 | 1.3750 | +0.2500 |" in shown
    assert "| 64 largest: bits per byte above whole logits | -0.005 to 0.012 | 0.2500 | **not** |" in shown


def test_a_run_that_was_stopped_is_kept_up_to_its_last_evaluation(tmp_path: Path) -> None:
    for name, evaluations in (("stored-chain-whole", (0, 2)), ("stored-chain-64", (0,))):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        step = {"ids": [0, 1], "loss": 2.0, "seconds": 0.5, "tokens_per_second": 10.0, "teacher_wait": 0.0}
        (directory / "steps.jsonl").write_text("".join(json.dumps(step | {"step": n}) + "\n" for n in range(3)))
        rows = [{"step": at, page.TEST: 1.5} for at in evaluations]
        (directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    collect(tmp_path, tmp_path / "out" / "result.json")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert list(result["runs"]) == ["stored-chain-whole"]
    assert result["runs"]["stored-chain-whole"]["curve"][-1] == {"step": 2, page.TEST: 1.5}
    assert result["not_finished"] == ["stored-chain-64", "stored-chain-whole"]


def of_second(losses: list[float], ids: str) -> dict[str, Any]:
    """A run of the stage `second`."""
    return {
        "steps": len(losses), "samples_per_step": 24, "loss": losses[-1], "losses": losses, "ids_sha256": ids,
        "seconds_per_step": 0.5, "trainer_peak_bytes": 1 << 30, "curve": [{"step": 2, page.TEST: 1.25}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "ids", "shown"),
    [
        ([4.0, 2.001], "a", "| hidden states | 2 | yes | 4.00000 | 4.00000 | 0.0e+00 | 5.0e-04 | within |"),
        ([4.004, 2.1], "a", "| hidden states | 2 | yes | 4.00000 | 4.00400 | 1.0e-03 | 5.0e-02 | first step within |"),
        ([4.4, 2.0], "b", "| hidden states | 2 | **no** | 4.00000 | 4.40000 | 1.0e-01 | 1.0e-01 | **not within** |"),
    ],
)
def test_a_run_from_a_store_is_compared_with_the_living_teacher(losses: list[float], ids: str, shown: str) -> None:
    runs = {"stored-living-hidden": of_second([4.0, 2.0], "a"), "stored-again-hidden": of_second(losses, ids)}
    result = {"machine": {"gpus": [], "torch": "2"}, "learning_rate": 1e-4, "runs": runs, "builds": {}}
    assert shown in page.render(result)


def test_what_a_content_costs_is_measured_and_shown(tmp_path: Path) -> None:
    teacher = make_assets(tmp_path).teacher
    text = write_jsonl(tmp_path / "text.jsonl", documents(3, seed=1))
    ids = token_ids(teacher, text, 4, 64)
    assert ids.shape == (4, 64)
    made = measure(teacher, text, torch.device("cpu"), sizes=(4, 16), tokens=300, length=64, rounds=2)
    assert made["rows"] == 4
    assert list(made["forms"]) == ["forward pass alone", "hidden", "logits", "topk 4", "topk 16", "sorted 64"]
    assert all(form["seconds"] >= form["seconds_least"] > 0 for form in made["forms"].values())
    assert made["forms"]["topk 4"]["slot_bytes"] == 256 * (2 * 4 + 4) * 4
    result = {"machine": {"gpus": [], "torch": "2"}, "learning_rate": 1e-4, "runs": {}, "builds": {}, "producer": made}
    lines = [line for line in page.render(result).splitlines() if line.startswith("| 16 largest |")]
    assert len(lines) == 1
    assert lines[0].endswith(f"| {256 * 36 * 4 / (1 << 20):.1f} |")


def of_machine(runs: dict[str, int], start: float = 1.5, **others: Any) -> dict[str, Any]:
    """A result file of runs that were evaluated before their first step and at another one."""
    made = {
        name: {"curve": [{"step": 0, page.TEST: start}, {"step": last, page.TEST: 1.25}], "of": len(runs)}
        for name, last in runs.items()
    }
    machine = {"gpus": ["A"], "cpus": 8, "torch": "2"}
    return {"machine": machine, "condition": "c", "learning_rate": 1e-4, "runs": made, "not_finished": [],
            "builds": {}} | others  # fmt: skip


def test_a_result_keeps_what_another_machine_has_shown() -> None:
    known = of_machine({"whole": 40, "64": 60, "16": 60}, not_finished=["whole"], builds={"topk": 1})
    found = of_machine(
        {"whole": 60, "64": 20}, not_finished=["64", "256"], builds={"hidden": 2}, producer={"forms": {}}
    )
    both = merged(known, found)
    assert {name: run["of"] for name, run in both["runs"].items()} == {"16": 3, "64": 3, "whole": 2}
    assert both["not_finished"] == ["256"]
    assert both["builds"] == {"topk": 1, "hidden": 2}
    assert both["producer"] == {"forms": {}}
    assert merged(both, of_machine({}))["producer"] == {"forms": {}}
    assert merged(both, of_machine({"16": 60}))["runs"]["16"]["of"] == 1


@pytest.mark.parametrize("other", [{"start": 1.6}, {"condition": "d"}, {"learning_rate": 2e-4}])
def test_a_result_of_other_texts_or_settings_is_not_merged(other: dict[str, Any]) -> None:
    with pytest.raises(OtherTextError, match="nothing was merged"):
        merged(of_machine({"whole": 60}), of_machine({"whole": 60}, **other))


def test_what_a_second_run_saves_is_shown_of_runs_of_equal_length() -> None:
    measured = {"run_seconds": 70.0, "gpu_before_bytes": 1 << 30, "gpu_peak_bytes": 15 << 30}
    runs = {
        "stored-living-logits": of_second([4.0, 2.0], "a") | measured,
        "stored-again-topk": of_second([4.0, 2.0], "a") | measured | {"run_seconds": 40.0, "gpu_peak_bytes": 11 << 30},
        "stored-again-hidden": of_second([4.0], "a") | measured,
    }
    shown = page.render({"machine": {"gpus": [], "torch": "2"}, "learning_rate": 1e-4, "runs": runs, "builds": {}})
    assert "with its whole logits: from 64 largest logits 40 s instead of 70, 10.0 GiB instead of 14.0." in shown


def test_a_run_from_a_store_that_was_ended_early_is_compared_over_its_steps() -> None:
    living = of_second([2.0] * 9, "a") | {"step_seconds": [9.0] * 5 + [0.5, 0.7, 8.0, 8.0]}
    again = of_second([2.0] * 7, "b") | {
        "step_seconds": [9.0] * 5 + [0.25, 0.35],
        "curve": [{"step": 0, page.TEST: 1.5}],
    }
    runs = {"stored-living-logits": living, "stored-again-hidden": again}
    shown = page.render({"machine": {"gpus": [], "torch": "2"}, "learning_rate": 1e-4, "runs": runs, "builds": {}})
    assert "| hidden states, from the store | 7 |  | 0.500 |" in shown
    assert "hidden states was ended after 7 steps." in shown
    assert "with the living teacher: the whole step 0.300 s and 0.600 s." in shown
