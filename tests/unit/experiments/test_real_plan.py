"""The plan of the experiment on real models: early ends, micro-batches, and the weights that are tried at one rate."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from experiments import jobs
from experiments.real import results, stages, summary
from experiments.real.methods import METHODS, MICRO_BATCH_TOKENS, PATIENCE, RATES, Cell, cells, job
from experiments.real.page import RESULT
from tests.unit.experiments.test_real_runs import curve, result, write_run
from xtoken_core.config.spec import parse_run_spec
from xtoken_services.trainer.best import best_evaluation


def test_other_weights_are_tried_at_the_rate_that_is_best_with_the_first() -> None:
    def row(weight: str, rate: float, bits: float) -> dict[str, Any]:
        return {**vars(Cell("de-500k", "gold", weight, rate, 0)), "curve": curve((0, 2.0, 2.0), (25, bits, bits))}

    rows = [row("even", rate, bits) for rate, bits in zip(RATES, (1.5, 1.4, 1.6), strict=True)]
    planned = results.tried(cells(("de-500k",), ("gold",), (), (0,)), rows)
    assert [(cell.weight, cell.rate) for cell in planned if cell.weight != "even"] == [
        ("light", RATES[1]),
        ("strong", RATES[1]),
    ]
    assert [cell.rate for cell in planned if cell.weight == "even"] == list(RATES)
    found = {"machine": {}, "conditions": {"de-500k": None}, "teachers": {}, "not_run": [], "runs": rows}
    begun = results.merged(found, {**found, "runs": [row("light", RATES[0], 1.2), row("strong", RATES[1], 1.3)]})
    assert [(each["weight"], each["rate"]) for each in begun["not_run"]] == [("light", RATES[1])]
    assert {(each.weight, each.rate) for each in summary.outcomes(begun)} == {("even", RATES[1]), ("strong", RATES[1])}


def test_other_weights_do_not_stand_for_a_sweep_that_is_not_complete() -> None:
    rows = [{**vars(Cell("de-500k", "gold", weight, RATES[-1], 0)), "curve": curve((0, 1.5, 1.5))}
            for weight in ("even", "light")]  # fmt: skip
    found = {"machine": {}, "conditions": {"de-500k": None}, "teachers": {}, "not_run": [], "runs": rows}
    assert summary.outcomes(results.merged(found, found)) == []


def test_known_runs_report_the_same_if_they_end_early() -> None:
    """Hold every curve of the result file against `eval.patience`: its best step on validation stays."""
    known = results.read_result(RESULT)["runs"]
    for run in known:
        best = min(run["curve"], key=lambda row: row["bits_per_byte"])
        for end in range(2, len(run["curve"]) + 1):
            rows = run["curve"][:end]
            found = best_evaluation(rows)
            if found is not None and found.evaluations_since >= PATIENCE:
                assert best in rows, results.cell_of(run).name
                break


def test_runs_end_early_and_say_so(tmp_path: Path) -> None:
    cell = next(cells(("de-500k",), ("ce",), (), (0,)))
    assert tomllib.loads(job(cell).file)["eval"]["patience"] == PATIENCE
    assert tomllib.loads(job(cell, patience=0).file)["eval"]["patience"] == "none"
    write_run(tmp_path, cell, 1.5)
    run = tmp_path / "runs" / cell.name
    whole = stages.collect(tmp_path, [cell], tmp_path / "whole.json")["runs"][0]
    (run / "summary.json").write_text('{"steps": 75, "stopped_early": "2 evaluations in a row"}')
    (run / "spec.json").write_text('{"student": {"compile": true}, "train": {"micro_batch_tokens": 6912}}')
    early = stages.collect(tmp_path, [cell], tmp_path / "early.json")["runs"][0]
    assert early == whole | {"stopped_at": 75, "micro_batch_tokens": 6912, "compiled": True}


def test_memory_stands_beside_the_micro_batches_that_it_belongs_to() -> None:
    found = result(("ce", 1e-4, 0, curve((0, 1.5, 1.5))), ("ce", 2e-4, 0, curve((0, 1.4, 1.4))))
    for run, tokens in zip(found["runs"], (None, 13_312), strict=True):
        run["metrics"] = {"memory_peak_bytes": 2**31 if tokens is None else 2**33}
        run |= {} if tokens is None else {"micro_batch_tokens": tokens}
    assert summary.markdown(found, "de-500k", {}).endswith("| 2.0, 8.0 at 13,312 |\n")


def test_large_micro_batches_belong_to_methods_that_read_no_ring_of_logits() -> None:
    for name, method in METHODS.items():
        spec = parse_run_spec(tomllib.loads(job(next(cells(("de-500k",), (name,), (), (0,)))).file), source=name)
        large = spec.train.micro_batch_tokens > MICRO_BATCH_TOKENS
        assert not large or not method.teachers or spec.content_of(0) == "hidden" or method.teacher
        assert not (large and (method.custom or method.loss.get("mode") in ("p_kl", "uld")))


def test_nothing_is_started_when_the_time_is_up(tmp_path: Path) -> None:
    assert not jobs.run_all(tmp_path, [jobs.Job("ce-0", "")], side_by_side=1, until=0.0)
    assert not (tmp_path / "ce-0.toml").exists()


def test_what_nobody_reads_of_a_finished_run_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.sys, "executable", str(tmp_path / "runner"))
    (tmp_path / "runner").write_text(f"#!/bin/sh\ntouch {tmp_path}/runs/whole/summary.json\n")
    (tmp_path / "runner").chmod(0o755)
    for name in ("whole", "stopped"):
        (tmp_path / "runs" / name / "model").mkdir(parents=True)
    wanted = [jobs.Job(name, "", discards=("model", "checkpoints")) for name in ("whole", "stopped")]
    jobs.run_all(tmp_path, wanted, side_by_side=2, until=time.monotonic() + 300)
    assert [(tmp_path / "runs" / name / "model").is_dir() for name in ("whole", "stopped")] == [False, True]
