"""Micro-batches that some teachers compare: the terms of a step add up to one mean over all of its samples."""

from typing import Any

import pytest
import torch

from tests.unit.losses.loss_cases import V_S, Case, loss_of, make_case
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss

FIRST, SECOND = [0, 1], [2, 3]
"""Samples of the first teacher's micro-batch, and of the second's."""


def case_of(*same_tokenizer: bool, weights: tuple[float, float] | None = (1.0, 2.0)) -> Case:
    return make_case(lengths=(9, 7, 8, 9), same_tokenizer=same_tokenizer, teacher_vocab=(31, 27), weights=weights)


def part(case: Case, config: LossConfig, rows: list[int], teachers: list[int], shares: Any = None, **step: Any) -> Any:
    """The loss, gradient and metrics of a micro-batch of these samples and teachers."""
    own = case.rows(rows)
    logits = own.student_logits.clone().requires_grad_()
    loss, metrics = loss_of(case, config).among(teachers, shares)(
        own.batch, logits, [own.teacher_logits[teacher] for teacher in teachers], **step
    )
    loss.backward()
    return loss.detach(), logits.grad, metrics


@pytest.mark.parametrize("same", [(False, False), (True, False), (True, True)])
def test_the_terms_are_one_mean_over_all_samples(same: tuple[bool, bool]) -> None:
    case, config = case_of(*same), LossConfig(vocab_topk=None, kl_loss_weight=1.0, ce_loss_scale=0.0)
    alone = [part(case, config, rows, [teacher])[2] for teacher, rows in enumerate((FIRST, SECOND))]
    means = [float(metrics[f"kl_loss_t{teacher}"]) for teacher, metrics in enumerate(alone)]
    counts = [
        float(loss.count(case.rows(rows).batch))
        for loss, rows in zip(loss_of(case, config).losses, (FIRST, SECOND), strict=True)
    ]
    total = 0.0
    for teacher, rows in enumerate((FIRST, SECOND)):
        loss, gradient, metrics = part(
            case, config, rows, [teacher],
            global_valid_toks=40, global_valid_chunks=[counts[teacher]], shares=(0.25, 0.75),
        )  # fmt: skip
        assert {name for name in metrics if name.startswith("kl_loss_t")} == {f"kl_loss_t{teacher}"}
        assert float(metrics[f"kl_loss_t{teacher}"]) == pytest.approx(means[teacher]), "the teacher's own mean"
        assert gradient.abs().sum() > 0
        total += float(loss)
    assert total == pytest.approx(0.25 * 1.0 * means[0] + 0.75 * 2.0 * means[1])


def test_shares_of_one_change_nothing() -> None:
    case, config = case_of(False, False), LossConfig(vocab_topk=6)
    step = {"global_valid_toks": 30, "global_valid_chunks": [11, 12]}
    plain, shared = (part(case, config, [0, 1, 2, 3], [0, 1], **step, **more) for more in ({}, {"shares": [1.0, 1.0]}))
    assert torch.equal(plain[0], shared[0]) and torch.equal(plain[1], shared[1])


def test_a_choice_and_an_average_are_of_the_teachers_that_a_micro_batch_has() -> None:
    case = case_of(True, True, weights=None)
    select = LossConfig(vocab_topk=None, teacher_aggregation="select_teacher", ce_loss_scale=0.0)
    own = case.rows(SECOND)
    chosen = loss_of(case, select).among([1]).select(own.batch, [own.teacher_logits[1]])
    tokens = float(loss_of(case, select).losses[1].count(own.batch))
    assert float(chosen.chunks) == tokens
    step: dict[str, Any] = {"global_valid_toks": 40, "global_valid_chunks": [tokens], "shares": (0.5, 0.5)}
    loss, _, metrics = part(case, select, SECOND, [1], **step, global_selected_chunks=80, selection=chosen)
    assert metrics["weight_t1"] == 1 and "weight_t0" not in metrics
    assert float(loss) == pytest.approx(float(metrics["kl_loss_t1"]) * tokens / 80), "one denominator for all choices"
    average = LossConfig(vocab_topk=None, teacher_aggregation="averaged_logits", ce_loss_scale=0.0)
    loss, _, metrics = part(case, average, SECOND, [1], **step)
    only = CrossTokenizerDistillationLoss(average, student_vocab_size=V_S, teachers=case.teachers[1:])
    expected, _ = only(own.batch, own.student_logits, [own.teacher_logits[1]], global_valid_toks=40)
    assert float(loss) == pytest.approx(float(expected)), "the mean over the step's tokens, whoever is averaged"
