"""One rank's step, without a queue: what it does before its first backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.runs import resolved_run
from tests.unit.losses.loss_cases import V_S, Case, make_case
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.objective import Selection
from xtoken_core.plan import MicroBatch
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.step import ClaimedBatch, StepRunner


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepRunner:
    """Its loss finds three chunks in every micro-batch, and the second teacher the better one."""
    worker: Any = SimpleNamespace(queue=None, run=resolved_run(tmp_path, teachers=2), beats=0)
    worker.beat = lambda: setattr(worker, "beats", worker.beats + 1)
    loss: Any = SimpleNamespace(select=lambda *_: Selection(torch.tensor(1), torch.tensor(3.0)))
    device: Any = SimpleNamespace(device=torch.device("cpu"))
    rings: Any = None
    made = StepRunner(worker, device, loss, rings, RankGroup(0, 1), rank=0, pad_id=0)
    monkeypatch.setattr(made, "_teacher_logits", lambda _: [])
    return made


CLAIMED = ClaimedBatch(MicroBatch((0, 1), (8, 8, 8)), {}, None, [])


def test_the_teachers_of_a_step_are_chosen_and_their_chunks_added_up(runner: StepRunner) -> None:
    choices = runner._choose([CLAIMED, None, CLAIMED])
    assert [int(found.chosen) for found in choices.of_batch] == [1, 0, 1]
    assert float(choices.chunks) == 6


def test_a_step_without_a_micro_batch_has_nothing_to_choose(runner: StepRunner) -> None:
    choices = runner._choose([])
    assert (choices.of_batch, float(choices.chunks)) == ([], 0)


def gradient(run: ResolvedRun, case: Case, step: int) -> torch.Tensor:
    """The gradient of the student's logits in a step of a run, by a trainer that begins with this step."""
    logits = case.student_logits.clone().requires_grad_()
    student: Any = SimpleNamespace(device=torch.device("cpu"), blockwise=False, outputs=lambda *_: logits * 1.0)
    loss = CrossTokenizerDistillationLoss(run.spec.loss, student_vocab_size=V_S, teachers=case.teachers)
    worker: Any = SimpleNamespace(queue=None, run=run)
    absent: Any = None
    runner = StepRunner(worker, student, loss, absent, RankGroup(0, 1), rank=0, pad_id=0)
    runner._teacher_logits = lambda _: list(case.teacher_logits)  # type: ignore[method-assign]
    plan: Any = SimpleNamespace(step=step, ce_tokens=20, kd_chunks=(12,))
    weight = run.spec.loss.kl_weight_at(step, run.steps)
    metrics = runner._backward(plan, replace(CLAIMED, data=case.batch), 0, None, weight)
    assert logits.grad is not None
    assert metrics["kl_loss_scale"].item() == pytest.approx(weight)
    return logits.grad


def test_the_divergence_has_its_weight_at_the_step_in_the_gradient(tmp_path: Path) -> None:
    def run(**loss: Any) -> ResolvedRun:
        made = resolved_run(tmp_path, positions=40)
        config = LossConfig(mode="p_kl", vocab_topk=6, ce_loss_scale=1.0, **loss)
        return made.model_copy(update={"spec": made.spec.model_copy(update={"loss": config})})

    case, fading = make_case(), run(kl_loss_weight=2.0, kl_loss_weight_end=0.0)
    assert fading.steps == 5
    with_kd, alone = (gradient(run(kl_loss_weight=weight), case, 0) for weight in (1.0, 0.0))
    for step, weight in [(3, 0.5), (0, 2.0), (4, 0.0), (2, 1.0), (3, 0.5)]:  # in no order: no step depends on another
        expected = alone + weight * (with_kd - alone)
        torch.testing.assert_close(gradient(fading, case, step), expected)


@pytest.mark.parametrize("generates", [True, False])
def test_a_step_with_completions_has_the_overlap_ratio(tmp_path: Path, generates: bool) -> None:
    made = resolved_run(tmp_path)
    update = {"loss": LossConfig(), "rollout": RolloutSpec() if generates else None}
    run = made.model_copy(update={"spec": made.spec.model_copy(update=update)})
    case = make_case(same_tokenizer=(True,))
    case.batch["weights_version"] = torch.tensor([-1, 3, 3, -1])
    case.teacher_logits[0][1] = torch.nn.functional.pad(case.student_logits[1], (0, -1))
    case.batch["sample_mask"][2] = 0.0
    student: Any = SimpleNamespace(
        device=torch.device("cpu"), blockwise=False, outputs=lambda *_: case.student_logits.requires_grad_() * 1.0
    )
    loss = CrossTokenizerDistillationLoss(run.spec.loss, student_vocab_size=V_S, teachers=case.teachers)
    absent: Any = None
    worker: Any = SimpleNamespace(queue=None, run=run)
    runner = StepRunner(worker, student, loss, absent, RankGroup(0, 1), rank=0, pad_id=0)
    runner._teacher_logits = lambda _: list(case.teacher_logits)  # type: ignore[method-assign]
    plan: Any = SimpleNamespace(step=0, ce_tokens=20, kd_chunks=(20,), plan=SimpleNamespace(micro_batches=3))
    metrics = runner._backward(plan, replace(CLAIMED, data=case.batch), 0, None, 1.0)
    assert ("overlap_ratio" in metrics) == generates
    assert not generates or metrics["overlap_ratio"] == 1, "completions alone count, of which this teacher is sure"


def test_choosing_is_progress(runner: StepRunner) -> None:
    runner._choose([CLAIMED] * 3)
    assert runner.worker.beats == 3, "all of a step may take longer than one micro-batch is given"
