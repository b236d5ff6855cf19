"""The adaptive weight of the divergence, from the lines of `eval.jsonl`, or else of `steps.jsonl`."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import cases
from tests.support.runs import changed, resolved_run
from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.routing import Routes
from xtoken_services.common.files.jsonl import JsonLines
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.kd_weight import KdWeight


def adaptive(tmp_path: Path, *, held_out: bool = True, epochs: int = 1, **loss: Any) -> ResolvedRun:
    run = resolved_run(tmp_path, positions=400)
    run = changed(run, loss=LossConfig(kl_loss_weight=2.0, **loss), eval=EvalSpec() if held_out else None)
    return run.model_copy(update={"positions": 400 * epochs})


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
    # The student of step 0 decides until the next evaluation; means: 1.1, 1.025, .95, .88, .847
    assert weights == pytest.approx([0.0, 2.0, 2.0, 1.0, 0.0, 0.0])
    lines.append(line(6, 1.035))
    follower.update(6)
    assert follower.at(6) == pytest.approx(2.0 * (1 + (0.89 + 0.85 + 1.035 - 3) / 3 / 0.1)), "and it may rise again"
    resumed = KdWeight(run, RankGroup(0, 1))
    resumed.update(6)
    assert resumed.at(6) == follower.at(6)
    resumed.update(2)
    assert resumed.at(2) == 2.0, "evaluations after the step of a resume are not read"


@cases(
    "change, why",
    ({"bytes": (1 << 16) - 1}, "fewer than 64 KiB"),
    ({"teacher_bits_per_byte": None}, "the teacher has not been measured"),
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


def test_a_teacher_of_few_bits_is_passed_by_a_quarter_of_them(tmp_path: Path) -> None:
    run = adaptive(tmp_path)
    follower, lines = KdWeight(run, RankGroup(0, 1)), JsonLines(run.spec.output / "eval.jsonl")
    weights = []
    for step, bits in enumerate((0.07, 0.06, 0.05)):
        lines.append(line(step, bits, teacher_bits_per_byte=0.064))
        follower.update(step)
        weights.append(follower.at(step))
    assert weights == pytest.approx([2.0, 2 * (1 - 0.004 / 0.016), 2 * (1 - 0.009 / 0.016)])


def text(step: int, *behind: float, size: int = 1 << 15, **other: Any) -> dict[str, Any]:
    """A step's metrics: how many bits per byte the student is behind each teacher, which has 1."""
    row: dict[str, Any] = {"step": step, "loss": 1.0, "ids": [step]}
    for teacher, bits in enumerate(behind):
        nats = {"text_nats": (1 + bits) * size * math.log(2), "text_teacher_nats": size * math.log(2)}
        row |= {f"{name}_t{teacher}": value for name, value in {**nats, "text_bytes": float(size)}.items()}
    return row | other


def test_without_held_out_text_the_last_windows_of_the_first_pass_decide(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = adaptive(tmp_path, held_out=False, epochs=2)  # 400 records in steps of 8
    follower, lines = KdWeight(run, RankGroup(0, 1)), JsonLines(run.spec.output / "steps.jsonl")
    assert [follower.measures(step) for step in (0, 49, 50, 99)] == [True, True, False, False]
    weights: list[float] = []
    rows = [text(step, bits) for step, bits in enumerate((0.1, 0.1, 0, 0, -0.2, -0.2, -0.2, -0.2, -0.3))]
    rows.insert(2, text(2, -9.0, nonfinite=True))
    rows.insert(3, {"step": 3})
    rows.insert(4, text(4, math.nan))
    with caplog.at_level(logging.INFO):
        for step, row in enumerate(rows):
            follower.after_step(step, row)
            lines.append(row | {"step": step})
            weights.append(follower.at(step + 1))
        # Two steps are a window; after the second, third and fourth the means are .05, -.0333 and -.1333.
        assert weights[4:11:2] == pytest.approx([2.0, 2.0, 2 * (1 - 1 / 3), 0.0])
        assert weights[5:12:2] == weights[4:11:2], "half a window decides nothing"
        again = KdWeight(run, RankGroup(0, 1))
        again.update(len(rows))
        assert again.at(12) == follower.at(12) == 0.0
        for step, row in enumerate([text(0, 0.2)] * 50):
            for each in (follower, again):
                each.after_step(12 + step, row)
            assert again.at(13 + step) == follower.at(13 + step)
    assert follower.at(60) == 2.0 and "the student is ahead of its teacher" in caplog.text
    assert "stays 2: all text has been read once" in caplog.text
    follower.after_step(62, text(62, -9.0, size=1 << 20))
    assert follower.at(63) == 2.0, "the second pass is not measured"


def test_the_best_teacher_on_the_text_decides(tmp_path: Path) -> None:
    follower = KdWeight(adaptive(tmp_path, held_out=False), RankGroup(0, 1))
    follower.after_step(0, text(0, -0.5, -0.05, -0.2, size=1 << 16))
    assert follower.at(1) == pytest.approx(1.0)


@cases(
    "rows, why",
    ([text(0, -9.0, size=1 << 10)] * 50, "all text has been read once"),
    ([text(0)], "the loss does not name the text"),
)
def test_text_that_decides_nothing_leaves_the_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: list[dict[str, Any]], why: str
) -> None:
    follower = KdWeight(adaptive(tmp_path, held_out=False, epochs=2), RankGroup(0, 1))
    with caplog.at_level(logging.INFO):
        for step, row in enumerate(rows):
            follower.after_step(step, row)
    assert follower.at(50) == 2.0 and why in caplog.text


def test_a_run_with_completions_and_no_held_out_text_has_one_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = adaptive(tmp_path, held_out=False, kl_loss_weight_end="adaptive")
    follower = KdWeight(changed(run, rollout=RolloutSpec()), RankGroup(0, 1))
    with caplog.at_level(logging.INFO):
        follower.update(0)
    follower.after_step(0, text(0, -9.0, size=1 << 20))
    assert follower.at(9) == 2.0 and "there is no held-out text" in caplog.text


def test_nothing_is_said_before_the_first_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = KdWeight(adaptive(tmp_path), RankGroup(0, 1))
    with caplog.at_level(logging.INFO):
        follower.update(0)
    assert follower.at(9) == 2.0 and not caplog.records


def test_a_linear_weight_reads_no_evaluation(tmp_path: Path) -> None:
    run = adaptive(tmp_path, kl_loss_weight_end=0.0)
    follower = KdWeight(run, RankGroup(0, 1))
    JsonLines(run.spec.output / "eval.jsonl").append(line(1, 0.5))
    follower.update(1)
    assert (follower.at(0), follower.at(run.steps - 1)) == (2.0, 0.0)


def test_another_text_without_a_finite_result_does_not_decide(tmp_path: Path) -> None:
    run = adaptive(tmp_path)
    also = EvalSpec.model_validate({"also": tmp_path / "fr.jsonl"})
    run = changed(run, eval=also).model_copy(update={"routes": Routes.model_construct()})
    follower, lines = KdWeight(run, RankGroup(0, 1)), JsonLines(run.spec.output / "eval.jsonl")
    for step, bits, weight in ((1, 1.2, 2.0), (2, math.nan, 2.0), (3, math.nan, 2.0), (4, math.nan, 0.0)):
        of_it = {"bits_per_byte_fr": bits, "bytes_fr": 1 << 16, "teacher_bits_per_byte_fr": 1.0}
        lines.append(line(step, 0.5, **of_it))
        follower.update(step)
        assert follower.at(step) == weight
