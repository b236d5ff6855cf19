"""The weight of the KD term over a run: what it is at a step, and that every path of the loss uses it."""

import pytest
import torch

from tests.unit.losses.loss_cases import V_S, loss_of, make_case
from tests.unit.losses.test_lazy_logits import leaves, random_head
from xtoken_core.config import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection
from xtoken_core.losses.alm import ALMLoss
from xtoken_core.losses.registry import LOSSES


class OwnLoss(ALMLoss):
    """A loss outside of the library."""

    mode = "custom"


MODES = {"p_kl": {"vocab_topk": 6}, "gold": {"mode": "gold"}, "alm": {"mode": "alm"}, "custom": {"mode": "custom"}}
SEVERAL = {
    "sum": {"teacher_modes": ("p_kl", "gold", "none"), "vocab_topk": 6},
    "dynamic_weights": {"mode": "p_kl", "vocab_topk": 6, "dynamic_teacher_weights": "ce"},
    "select_teacher": {"mode": "p_kl", "vocab_topk": 6, "teacher_aggregation": "select_teacher"},
}
CASES = {name: (settings, make_case()) for name, settings in MODES.items()} | {
    name: (settings, make_case(same_tokenizer=(False, False, True), teacher_vocab=(31, 19)))
    for name, settings in SEVERAL.items()
}


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1.0, 0.0, [1.0, 0.75, 0.5, 0.25, 0.0]),
        (0.5, 2.5, [0.5, 1.0, 1.5, 2.0, 2.5]),
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.3, None, [0.3] * 5),
        (0.3, "none", [0.3] * 5),
    ],
    ids=["fading", "growing", "beginning", "constant", "none"],
)
def test_the_weight_goes_linearly_from_the_first_step_to_the_last(first, last, expected):
    config = LossConfig(kl_loss_weight=first, kl_loss_weight_end=last)
    weights = [config.kl_weight_at(step, 5) for step in range(5)]
    assert weights == pytest.approx(expected)
    assert (weights[0], weights[-1]) == (expected[0], expected[-1]), "both ends are exact"
    assert config.kl_weight_at(5, 5) == expected[-1], "an evaluation after the last step"


DEFAULTS = {
    "chain": ({}, "adaptive"),
    "chain by name": ({"mode": "chain", "ce_loss_scale": 0.1}, "adaptive"),
    "chain and ALM": ({"teacher_modes": ("chain", "alm")}, "adaptive"),
    "the divergence alone": ({"ce_loss_scale": 0.0}, None),
    "the divergence alone, as text": ({"ce_loss_scale": "0.0"}, None),
    "scaled": ({"dynamic_loss_scaling": True}, None),
    "not scaled, as text": ({"dynamic_loss_scaling": "false"}, "adaptive"),
    "other modes for each teacher": ({"teacher_modes": ("alm", "gold")}, None),
    "chain of one teacher": ({"mode": "p_kl", "teacher_modes": ("none", "chain")}, "adaptive"),
    "P-KL": ({"mode": "p_kl"}, None),
    "P-KL by a public name": ({"vocab_topk": 6}, None),
    "gold by its flag": ({"gold_loss": True}, None),
    "a constant weight": ({"kl_loss_weight_end": "none"}, None),
    "a set weight": ({"mode": "alm", "kl_loss_weight_end": 0.5}, 0.5),
}


@pytest.mark.parametrize(("settings", "last"), DEFAULTS.values(), ids=DEFAULTS)
def test_chain_beside_a_cross_entropy_adapts_by_default(settings, last):
    config = LossConfig(**settings)
    assert config.kl_loss_weight_end == last
    assert LossConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("behind", "expected"), [(None, 2.0), (3.0, 2.0), (0.0, 2.0), (-0.5, 1.0), (-1.0, 0.0), (-3.0, 0.0)]
)
def test_an_adaptive_weight_falls_once_the_student_has_passed_its_teacher(behind, expected):
    config = LossConfig(kl_loss_weight=2.0, kl_loss_weight_end="adaptive")
    assert [config.kl_weight_at(step, 5, behind) for step in (0, 4)] == pytest.approx([expected] * 2)
    assert LossConfig(kl_loss_weight_end=0.0).kl_weight_at(0, 5, behind) == 1.0, "others do not depend on it"


def test_the_only_step_of_a_run_has_the_first_weight():
    assert LossConfig(kl_loss_weight_end=0.0).kl_weight_at(0, 1) == 1.0


def gradients(config, case, *, blockwise, **step):
    """Loss, gradients of hidden states and head, and metrics."""
    loss_fn = loss_of(case, config, loss_classes={**LOSSES, "custom": OwnLoss})
    operands = leaves(random_head(case.student_logits.shape, 1))
    head = HeadProjection(*operands)
    loss, metrics = loss_fn(case.batch, head if blockwise else head.logits(), case.teacher_logits, **step)
    loss.backward()
    return [loss.detach(), *(x.grad for x in operands)], metrics


@pytest.mark.parametrize("blockwise", [False, True], ids=["whole", "blockwise"])
@pytest.mark.parametrize(("settings", "case"), CASES.values(), ids=CASES)
def test_a_step_is_trained_with_its_weight(settings, case, blockwise):
    fading = LossConfig(**settings, kl_loss_weight_end=0.0)
    for step, weight in enumerate((1.0, 0.5, 0.0)):
        constant = LossConfig(**settings, kl_loss_weight=weight)
        expected, _ = gradients(constant, case, blockwise=blockwise)
        found, metrics = gradients(fading, case, blockwise=blockwise, kl_loss_weight=fading.kl_weight_at(step, 3))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert metrics["kl_loss_scale"].item() == weight


@pytest.mark.parametrize("blockwise", [False, True], ids=["whole", "blockwise"])
@pytest.mark.parametrize("last", [1.0, None], ids=["run", "loop_of_ones_own"])
def test_a_weight_that_begins_at_0_is_trained_on(last, blockwise):
    case = make_case()
    growing = LossConfig(mode="p_kl", vocab_topk=6, kl_loss_weight=0.0, kl_loss_weight_end=last)
    expected, _ = gradients(LossConfig(mode="p_kl", vocab_topk=6), case, blockwise=blockwise)
    found, _ = gradients(growing, case, blockwise=blockwise, kl_loss_weight=1.0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("first", "name"), [(1.0, "kl_loss_weight"), (0.0, "kl_loss_weight_end")])
def test_a_weight_at_either_end_needs_a_teacher(first, name):
    config = LossConfig(kl_loss_weight=first, kl_loss_weight_end=1.0 - first)
    with pytest.raises(ConfigError, match=f"loss.{name} weighs the divergence from a teacher"):
        CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=[])


def test_gradient_in_place_may_end_with_cross_entropy_alone():
    assert LossConfig(gradient_in_place=True, kl_loss_weight_end=0.0).weighs_kd
