"""The best evaluation: which it is, when it ends a run, and that its checkpoint outlives newer ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import cases
from tests.support.evaluations import measured
from tests.support.runs import changed, resolved_run
from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.files.jsonl import JsonLines
from xtoken_services.common.run.resume import CHECKPOINTS, best_step, newest_checkpoint
from xtoken_services.trainer.best import BestEvaluation, BestFollower, best_evaluation, patience_of
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.export_checkpoint import step_of_best
from xtoken_services.trainer.main import held_out_summary


def rows(*bits: float | None) -> list[dict[str, Any]]:
    return [measured(value, step) for step, value in enumerate(bits)]


def test_the_best_evaluation_is_the_first_of_the_lowest_without_step_0() -> None:
    assert best_evaluation(rows(1.0)) is None
    assert best_evaluation(rows(1.0, 3.0, 2.0, 2.0, 2.5)) == BestEvaluation(2, 2.0, 2)
    assert best_evaluation(rows(1.0, None, 2.0, None)) == BestEvaluation(2, 2.0, 1)


def by_task(*right: float) -> list[dict[str, float]]:
    return [{"step": step, "bits_per_byte": 9.0, "task_accuracy_a": each} for step, each in enumerate(right)]


def test_by_tasks_the_best_has_the_highest_mean_accuracy_and_step_0_takes_part() -> None:
    assert best_evaluation(rows(1.0, 2.0), by_tasks=True) is None
    assert best_evaluation(by_task(0.8, 0.7, 0.75), by_tasks=True) == BestEvaluation(0, 9.0, 2)
    assert best_evaluation(by_task(0.5, 0.8, 0.7, 0.8, 0.6), by_tasks=True) == BestEvaluation(1, 9.0, 1)
    two = [row | {"task_accuracy_b": 0.5 - 0.2 * row["step"]} for row in by_task(0.5, 0.6, 1.0)]
    assert best_evaluation(two, by_tasks=True) == BestEvaluation(2, 9.0, 0)


@cases(
    "right, ends",
    ((0.8, 0.7, 0.6), [False, False, True]), ((0.8, 0.7, 0.8, 0.7, 0.9), [False] * 5),
    ((0.3, 0.5, 0.4, 0.45), [False, False, False, True]), ((1.0, 1.0, 1.0, 1.0), [False] * 4),
    ids=["from-the-first", "as-good-between", "after-a-rise", "none-is-below"],
)  # fmt: skip
def test_evaluations_below_the_best_accuracy_end_a_run(tmp_path: Path, right: list[float], ends: list[bool]) -> None:
    run = with_evaluation(resolved_run(tmp_path, positions=1 << 20))
    follower, lines = followed(changed(run, rollout=RolloutSpec(stop_when_worse=2)))
    found = []
    for row in by_task(*right):
        lines.append(row)
        follower.update(Cursor(step=int(row["step"])))
        found.append(follower.ends_run)
    assert found == ends
    summary = follower.summary(Cursor(step=len(right) - 1))
    assert summary["best"]["step"] == right.index(max(right))
    assert ("2 evaluations in a row were worse on tasks" in summary.get("stopped_early", "")) == ends[-1]


def test_a_summary_takes_the_evaluation_of_the_exported_weights_if_it_is_finite() -> None:
    assert held_out_summary(rows(2.0)) == {}
    found = held_out_summary(rows(2.0, 1.5))["held_out"]
    error = pytest.approx(0, abs=1e-9)
    sizes = {"standard_error": None, "documents": 4, "bytes": 4000, "difference_error": error}
    change = {"bits_per_byte_at_start": 2.0, "bits_per_byte": 1.5, "step": 1, "since_start": "better"}
    assert found == change | sizes
    beside = [{**row, "teacher_bits_per_byte": 1.0} for row in rows(2.0, 1.5)]
    assert held_out_summary(beside)["held_out"] == found | {"teacher_bits_per_byte": 1.0, "distance_covered": 0.5}
    for bits in (2.0, None), (None, 2.0), (2.0, float("nan")):
        found = held_out_summary(rows(*bits))["held_out"]
        assert found["since_start"] is None and json.loads(json.dumps(found, allow_nan=False))["step"] == 1


def with_evaluation(run: ResolvedRun, **settings: object) -> ResolvedRun:
    spec = EvalSpec.model_validate({"path": run.spec.data.paths, "every": 1, **settings})
    return changed(run, eval=spec)


def followed(run: ResolvedRun) -> tuple[BestFollower, JsonLines]:
    """What follows a run's evaluations, and where they are written."""
    follower = BestFollower(run, RankGroup(0, 1), Checkpoints(run.spec.output / CHECKPOINTS, run))
    return follower, JsonLines(run.spec.output / "eval.jsonl")


def test_patience_counts_evaluations_since_the_best(tmp_path: Path) -> None:
    run = with_evaluation(resolved_run(tmp_path), patience=2).model_copy(update={"positions": 1 << 20})
    follower, lines = followed(run)
    ends = []
    for row in rows(1.0, 2.0, 2.1, 1.9, 1.9, 2.0):
        lines.append(row)
        follower.update(Cursor(step=int(row["step"] or 0)))
        ends.append(follower.ends_run)
    assert ends == [False, False, False, False, False, True]
    follower.update(Cursor(step=4))
    assert not follower.ends_run, "a resume at an earlier step reads the evaluations up to it"
    follower.update(Cursor(step=run.steps))
    assert not follower.ends_run, "at its last step a run ends by itself"


@cases(
    "steps, every, settings, expected",
    (100, 1, {}, 50), (101, 5, {}, 11), (100, 10, {}, 8), (100, 1, {"patience": 3}, 3),
    (100, 1, {"patience": "none"}, None), (100, 1, {"keep_best": False}, None),
)  # fmt: skip
def test_by_default_half_of_the_evaluations_end_a_run(
    tmp_path: Path, steps: int, every: int, settings: dict[str, object], expected: int | None
) -> None:
    run = with_evaluation(resolved_run(tmp_path, positions=8 * steps), every=every, **settings)
    assert patience_of(run) == expected
    assert patience_of(changed(run, rollout=RolloutSpec())) == (expected if "patience" in settings else None)
    assert patience_of(resolved_run(tmp_path)) is None


def test_the_kept_checkpoint_outlives_newer_ones_until_another_is_kept(tmp_path: Path) -> None:
    run = resolved_run(tmp_path)
    directory = run.spec.output / CHECKPOINTS
    checkpoints = Checkpoints(directory, run)
    keeps = run.spec.train.keep_checkpoints
    for step in range(1, keeps + 4):
        checkpoints.save(Cursor(step=step), {"w": torch.full((1,), float(step))})
        if step in (1, 3):
            checkpoints.keep(step)
        checkpoints.wait()
        assert best_step(directory) == (1 if step < 3 else 3)
    last = range(keeps + 4 - keeps, keeps + 4)
    assert sorted(path.name for path in directory.glob("step-*")) == [f"step-{s:08d}" for s in sorted({3, *last})]
    assert newest_checkpoint(directory) == checkpoints.path_of(keeps + 3)
    assert (directory / "best" / "run.json").is_file()
    assert step_of_best(run.spec.output, None) == 3


def test_export_of_the_best_is_refused_beside_a_step_and_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--best and --step"):
        step_of_best(tmp_path, 3)
    with pytest.raises(InputError, match=r"eval\.keep_best"):
        step_of_best(tmp_path, None)


def test_a_summary_names_the_best_evaluation_without_either_setting(tmp_path: Path) -> None:
    follower, lines = followed(with_evaluation(resolved_run(tmp_path), keep_best=False))
    for row in rows(2.0, 1.5, 1.7):
        lines.append(row)
    assert not follower.is_on
    assert follower.summary(Cursor(step=2)) == {"best": {"step": 1, "bits_per_byte": 1.5, "evaluations_since": 1}}


def test_the_checkpoint_of_the_first_evaluation_is_kept_while_it_is_the_best(tmp_path: Path) -> None:
    run = with_evaluation(resolved_run(tmp_path), keep_best=True)
    directory = run.spec.output / CHECKPOINTS
    checkpoints = Checkpoints(directory, run)
    follower = BestFollower(run, RankGroup(0, 1), checkpoints)
    lines = JsonLines(run.spec.output / "eval.jsonl")
    before, first, second = rows(1.0, 2.0, 2.5)
    lines.append(before)
    follower.update(Cursor(step=1))
    assert not follower.wants_checkpoint(Cursor(step=1)), "there is no evaluation after step 0 yet"
    lines.append(first)
    follower.update(Cursor(step=1))
    assert follower.wants_checkpoint(Cursor(step=1))
    checkpoints.save(Cursor(step=1), {"w": torch.ones(1)})
    follower.protect()
    lines.append(second)
    follower.update(Cursor(step=2))
    assert not follower.wants_checkpoint(Cursor(step=2))
    follower.protect()
    checkpoints.wait()
    assert best_step(directory) == 1
