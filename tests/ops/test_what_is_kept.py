"""What the kernels keep for their backward: the inputs themselves, watched for changes, and only until then."""

import pytest
import torch

from tests.ops.op_cases import CASES, outputs
from xtoken_core.ops.registry import BACKENDS, load_backend

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
READ_AGAIN = {"p_kl": "", "p_kl_cross_entropy": "", "gold": "cut", "gold_cross_entropy": "cut", "cross_entropy": ""}


def differentiable_sum(op, inputs):
    return sum(out.sum() for out in outputs(op, inputs) if out.requires_grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", READ_AGAIN)
def test_logits_that_were_changed_before_the_backward_are_noticed(name, device):
    case, op = CASES[name][READ_AGAIN[name]], load_backend(BACKENDS[name]["triton"])
    inputs = case.make(torch.float32, torch.device(device))
    leaf = inputs[case.differentiable].requires_grad_()
    logits = leaf * 1.0
    total = differentiable_sum(op, inputs | {case.differentiable: logits})
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_result_keeps_no_logits_alive_after_its_backward(name):
    case, op = CASES[name][READ_AGAIN[name]], load_backend(BACKENDS[name]["triton"])
    inputs = case.make(torch.float32, torch.device("cuda"))
    leaf = inputs[case.differentiable].clone().requires_grad_()
    differentiable_sum(op, inputs | {case.differentiable: leaf})  # what is compiled or cached stays
    own = [name for name in ("logits", "student_logits", "teacher_logits") if name in inputs]
    for name in own:
        small = leaf if name == case.differentiable else inputs[name]
        inputs[name] = small.repeat(1, 1, 40_000)[..., : small.shape[-1]]
    large = sum(inputs[name].untyped_storage().nbytes() for name in own)
    total = differentiable_sum(op, inputs)
    torch.autograd.grad(total, leaf)
    before = torch.cuda.memory_allocated()
    for name in own:
        del inputs[name]
    assert before - torch.cuda.memory_allocated() >= large
    assert total.grad_fn is not None
