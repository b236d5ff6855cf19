"""The adaptive weight of the divergence, from the lines of `eval.jsonl`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import resolved_run
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.files.jsonl import JsonLines
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.kd_weight import KdWeight


def adaptive(tmp_path: Path, **loss: Any) -> ResolvedRun:
    run = resolved_run(tmp_path, positions=400)
    config = LossConfig(kl_loss_weight=2.0, **loss)
    return run.model_copy(update={"spec": run.spec.model_copy(update={"loss": config})})


def line(step: int, bits: float | None, **other: Any) -> dict[str, Any]:
    return {"step": step, "bits_per_byte": bits, "bytes": 1 << 16, "teacher_bits_per_byte": 1.0, **other}


def test_the_mean_of_the_last_three_evaluations_decides(tmp_path: Path) -> None:
    run = adaptive(tmp_path)
    follower, lines = KdWeight(run, RankGroup(0, 1)), JsonLines(run.spec.output / "eval.jsonl")
    weights = []
    for step, bits in enumerate((0.5, 1.1, 0.95, 0.8, 0.89, 0.85)):
        lines.append(line(step, bits))
        follower.update(step)
        weights.append(follower.at(step))
    # The student of step 0 decides nothing; means: 1.1, 1.025, .95, .88, .847
    assert weights == pytest.approx([2.0, 2.0, 2.0, 1.0, 0.0, 0.0])
    lines.append(line(6, 1.035))
    follower.update(6)
    assert follower.at(6) == pytest.approx(2.0 * (1 + (0.89 + 0.85 + 1.035 - 3) / 3 / 0.1)), "and it may rise again"
    resumed = KdWeight(run, RankGroup(0, 1))
    resumed.update(6)
    assert resumed.at(6) == follower.at(6)
    resumed.update(2)
    assert resumed.at(2) == 2.0, "evaluations after the step of a resume are not read"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bytes": (1 << 16) - 1}, "fewer than 64 KiB"),
        ({"teacher_bits_per_byte": None}, "the teacher has not been measured"),
    ],
)
def test_an_evaluation_that_decides_nothing_leaves_the_weight_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], why: str
) -> None:
    run = adaptive(tmp_path)
    follower, lines = KdWeight(run, RankGroup(0, 1)), JsonLines(run.spec.output / "eval.jsonl")
    with caplog.at_level(logging.INFO):
        for step in range(3):
            lines.append(line(step, 0.5, **change))
            follower.update(step)
            assert follower.at(step) == 2.0
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"stays 2: {why}" in said


def test_a_run_without_held_out_text_has_one_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = KdWeight(adaptive(tmp_path), RankGroup(0, 1))
    with caplog.at_level(logging.INFO):
        follower.update(0)
    assert follower.at(9) == 2.0 and "there is no held-out text" in caplog.text


def test_a_linear_weight_reads_no_evaluation(tmp_path: Path) -> None:
    run = adaptive(tmp_path, kl_loss_weight_end=0.0)
    follower = KdWeight(run, RankGroup(0, 1))
    JsonLines(run.spec.output / "eval.jsonl").append(line(1, 0.5))
    follower.update(1)
    assert (follower.at(0), follower.at(run.steps - 1)) == (2.0, 0.0)
