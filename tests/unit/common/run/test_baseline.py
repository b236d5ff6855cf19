"""Runs without a teacher: settings, the loss, and the baseline of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from tests.support.evaluations import measured
from xtoken_core.config import LossConfig
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.lazy_logits import HeadProjection
from xtoken_services.common.run.baseline import baseline_of, why_no_baseline
from xtoken_services.common.run.verdict import Verdict
from xtoken_services.supervisor.comparison import compare_with_baseline

RAW: dict[str, Any] = {
    "output": "/out",
    "student": {"model": "/student", "context_length": 32},
    "data": {"path": "/train.jsonl"},
}
TEACHER = {"model": "/teacher", "context_length": 48}


def test_a_run_without_teachers_is_trained_by_cross_entropy() -> None:
    spec = RunSpec.model_validate(RAW)
    assert (spec.teacher, spec.loss.kl_loss_weight, spec.loss.ce_loss_scale) == ((), 0.0, 1.0)
    assert RunSpec.model_validate(spec.model_dump()) == spec
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss": {"mode": "gold"}}, "loss.mode"),
        ({"loss": {"kl_loss_weight": 1.0}}, "loss.kl_loss_weight"),
        ({"loss": {"kl_loss_weight": 0.0, "kl_loss_weight_end": 0.5}}, "loss.kl_loss_weight_end"),
        ({"loss": {"dynamic_loss_scaling": True, "ce_loss_scale": 1.0, "kl_loss_weight": 1.0}}, "loss.kl_loss_weight"),
    ],
)
def test_settings_of_a_teacher_are_refused_without_one(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"{named} compares with a teacher"):
        RunSpec.model_validate(RAW | changes)


@pytest.mark.parametrize("last", [None, "none", 0.0])
def test_a_run_without_a_teacher_takes_a_weight_at_the_end_that_means_nothing(last: Any) -> None:
    assert not RunSpec.model_validate(RAW | {"teacher": [], "loss": {"kl_loss_weight_end": last}}).teacher


def test_a_baseline_is_the_run_without_its_teachers() -> None:
    held_out = {"path": "/heldout.jsonl", "every": 7}
    spec = RunSpec.model_validate(
        RAW | {"teacher": TEACHER, "loss": {"mode": "gold", "kl_loss_weight_end": 0.0}, "eval": held_out, "seed": 3}
    )
    baseline = baseline_of(spec)
    assert (baseline.output, baseline.name) == (Path("/out-baseline"), "run-baseline")
    assert baseline.teacher == () and not baseline.loss.weighs_kd
    assert (baseline.train, baseline.data, baseline.seed) == (spec.train, spec.data, 3)
    assert baseline.eval is not None and baseline.eval.every == 7


def test_a_baseline_of_completions_trains_on_the_text_that_is_given() -> None:
    spec = RunSpec.model_validate(
        RAW | {"teacher": TEACHER, "rollout": {"fraction": 0.5, "max_new_tokens": 8}, "push_to": "me/model"}
    )
    baseline = baseline_of(spec)
    assert baseline.rollout is None and baseline.push_to is None and baseline.train == spec.train
    for rollout in ({"after": 3}, {"fraction": [0.5, 1.0]}):
        assert not why_no_baseline(
            json.loads(
                RunSpec.model_validate(
                    RAW | {"teacher": TEACHER, "rollout": {"max_new_tokens": 8, **rollout}}
                ).model_dump_json()
            )
        )
    for changes, reason in (
        ({"teacher": TEACHER, "rollout": {"max_new_tokens": 8}}, r"rollout\.fraction = 1"),
        ({"teacher": TEACHER, "rollout": {"max_new_tokens": 8, "fraction": [1.0, 1.0]}}, r"rollout\.fraction = 1"),
        ({}, "no teacher, so it is its own baseline"),
    ):
        with pytest.raises(ConfigError, match=reason):
            baseline_of(RunSpec.model_validate(RAW | changes))


def comparison_line(output: Path) -> str:
    comparison = compare_with_baseline(output)
    return "" if comparison is None else comparison.line()


def test_a_run_is_compared_with_its_baseline(tmp_path: Path) -> None:
    for name, bits in (("out", 2.25), ("out-baseline", 2.5)):
        assert comparison_line(tmp_path / "out") == ""
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.jsonl").write_text(json.dumps(measured(bits, 8)) + "\n")
    assert "2.2500 bits per byte distilled" in comparison_line(tmp_path / "out")
    assert "better by 0.2500 ± 0.0000 after 8 steps" in comparison_line(tmp_path / "out")
    (tmp_path / "out" / "eval.jsonl").write_text(json.dumps(measured(2.4999, 8)) + "\n")
    comparison = compare_with_baseline(tmp_path / "out")
    assert comparison is not None and comparison.verdict is Verdict.SAME
    assert "no difference that counts (-0.0001;" in comparison.line()
    document = comparison.document()
    assert (document["baseline"], document["verdict"]) == (2.5, "no difference that counts")
    assert document["difference_error"] == pytest.approx(0, abs=1e-9)


def test_runs_that_keep_their_best_student_are_compared_by_that(tmp_path: Path) -> None:
    for name, worst in (("out", 9.0), ("out-baseline", None)):
        (tmp_path / name).mkdir()
        rows = ((0, 3.0), (8, 2.0 if name == "out" else 2.5), (16, worst), (24, worst))
        lines = "".join(json.dumps(measured(bits, step)) + "\n" for step, bits in rows)
        (tmp_path / name / "eval.jsonl").write_text(lines)
        (tmp_path / name / "spec.json").write_text('{"eval": {"keep_best": true}}')
    assert "2.0000 bits per byte distilled, 2.5000 by" in comparison_line(tmp_path / "out")
    assert "better by 0.5000 ± 0.0000 after 8 steps" in comparison_line(tmp_path / "out")


@pytest.mark.parametrize("blockwise", [False, True])
def test_the_loss_without_teachers_is_the_cross_entropy(blockwise: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, dtype=torch.float64)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    batch = {"input_ids": torch.randint(0, 11, (2, 6)), "token_mask": mask, "sample_mask": torch.ones(2)}
    loss_fn = CrossTokenizerDistillationLoss(
        LossConfig(kl_loss_weight=0.0, ce_loss_scale=1.0), student_vocab_size=11, teachers=[]
    )
    head = HeadProjection(hidden, weight) if blockwise else hidden @ weight.t()
    loss, metrics = loss_fn(batch, head, [])
    loss.backward()
    assert "kl_loss" not in metrics
    ours, hidden.grad = hidden.grad, None
    targets = torch.where(mask[:, 1:] == 1, batch["input_ids"][:, 1:], -100)
    expected = cross_entropy((hidden @ weight.t())[:, :-1].flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(ours, hidden.grad)
