"""P-KL's option that writes the gradient over the student's logits: same numbers, no memory of its own."""

from dataclasses import replace

import pytest
import torch

from tests.ops.op_cases import CASES
from tests.unit.losses.loss_cases import V_S, make_case
from xtoken_core.config import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.ops.registry import BACKENDS, load_backend

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
slow = pytest.mark.slow


def losses_of(inputs, logits, *, overwrite):
    op = load_backend(BACKENDS["p_kl_cross_entropy"]["triton"])
    options = replace(inputs["options"], overwrite=overwrite)
    result = op(*(inputs | {"student_logits": logits, "options": options}).values())
    return 3 * result.kl.sum() + result.losses.sum()


@every_device
def test_the_gradient_takes_the_memory_of_the_logits_and_is_the_same(device):
    inputs = CASES["p_kl_cross_entropy"][""].make(torch.float32, torch.device(device))
    leaf = inputs["student_logits"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(losses_of(inputs, leaf, overwrite=False), leaf)
    logits = leaf.clone()
    total = losses_of(inputs, logits, overwrite=True)
    (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(total, logits)


@every_device
@pytest.mark.parametrize("weight", [pytest.param(None, marks=slow), 0.25, pytest.param(0.0, marks=slow)])
def test_the_loss_trains_what_gave_the_logits_as_without_the_option(device, weight, monkeypatch):
    monkeypatch.setenv("XTOKEN_OPS", "p_kl_cross_entropy=triton")
    case = make_case(dtype=torch.float32)
    batch = {name: column.to(device) for name, column in case.batch.items()}
    gradients = []
    for in_place in (False, True):
        config = LossConfig(vocab_topk=6, gradient_in_place=in_place, kl_loss_weight_end=0.0)
        loss = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=case.teachers, device=device)
        leaf = case.student_logits.to(device).requires_grad_()
        loss(batch, 2 * leaf, [case.teacher_logits[0].to(device)], kl_loss_weight=weight)[0].backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.gpu
def test_the_backward_needs_no_second_tensor_as_large_as_the_logits():
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = CASES["p_kl_cross_entropy"][""].make(torch.float32, torch.device("cuda"))
    inputs["student_chunk_id"] = inputs["teacher_chunk_id"] = torch.arange(512, device="cuda").unsqueeze(0) // 3
    inputs["options"] = replace(inputs["options"], max_chunks=171)
    V_s, V_t = inputs["projection"].student_vocab_size, inputs["projection"].teacher_vocab_size
    inputs["teacher_logits"] = torch.randn(1, 512, V_t, device="cuda", generator=generator)
    inputs["targets"] = torch.zeros(1, 512, dtype=torch.int64, device="cuda")
    logits = torch.randn(1, 512, V_s + 30_000, device="cuda", generator=generator).requires_grad_() * 1.0
    total = losses_of(inputs, logits, overwrite=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(total, logits)
    assert torch.cuda.max_memory_allocated() - before < logits.numel() * 4 // 10


def test_the_reference_refuses_what_it_would_not_do(monkeypatch):
    monkeypatch.setenv("XTOKEN_OPS", "p_kl_cross_entropy=reference")
    with pytest.raises(ConfigError, match="gradient_in_place needs the Triton backend"):
        CrossTokenizerDistillationLoss(
            LossConfig(gradient_in_place=True), student_vocab_size=V_S, teachers=make_case().teachers
        )


REFUSED = {
    "gold": ({"gold_loss": True}, "belongs to P-KL, the mode is gold"),
    "no_kd": ({"kl_loss_weight": 0.0}, "whose weight is 0"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_where_it_would_not_be_used(changes, reason):
    with pytest.raises(ValueError, match=reason):
        LossConfig(gradient_in_place=True, **changes)


@pytest.mark.parametrize("same", [(True,), (False, False)], ids=["same_tokenizer", "two_teachers"])
def test_it_is_refused_with_teachers_that_read_the_logits_later(same):
    with pytest.raises(ConfigError, match="gradient_in_place needs a single teacher"):
        CrossTokenizerDistillationLoss(
            LossConfig(gradient_in_place=True), student_vocab_size=V_S, teachers=make_case(same_tokenizer=same).teachers
        )
