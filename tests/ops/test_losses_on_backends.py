"""The reference vectors through the losses with their ops on Triton."""

import pytest
import torch

from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.support.device import without_waiting
from tests.unit.losses.test_vectors import CASES, batch_of, loss_of
from xtoken_core.ops.registry import BACKENDS

TRITON = ",".join(f"{name}=triton" for name, backends in BACKENDS.items() if "triton" in backends)

QUICK = {"gold_padded", "p_kl_T2", "p_kl_reverse"}
"""Of each kernel; seconds each in the interpreter. The others run by `-m slow` and on a GPU."""
INTERPRETED = [pytest.param(case, marks=[pytest.mark.slow] * (case["name"] not in QUICK)) for case in CASES]


@pytest.mark.parametrize("case", INTERPRETED, ids=[case["name"] for case in CASES])
def test_vectors_in_the_interpreter(case, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("XTOKEN_OPS", TRITON)
    check(case, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["", TRITON], ids=["reference", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_vectors_on_the_gpu_without_a_host_synchronisation(case, ops, monkeypatch):
    monkeypatch.setenv("XTOKEN_OPS", ops)
    check(case, torch.device("cuda"))


def check(case, device):
    inputs, expected = case["inputs"], case["expected"]
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    loss_fn = loss_of(case, device)
    logits = moved["student_logits"].clone().requires_grad_()
    toks = torch.tensor(float(inputs["global_valid_toks"]), device=device)
    batch = batch_of(moved)
    if device.type == "cuda":
        warm_up, _ = loss_fn(batch, logits, [moved["teacher_logits"]], global_valid_toks=toks)
        torch.autograd.grad(warm_up, logits)  # compiles kernels, which synchronises
    with without_waiting():
        loss, metrics = loss_fn(batch, logits, [moved["teacher_logits"]], global_valid_toks=toks)
        loss.backward()
    bound = OUTPUT["chunk", torch.float32]
    for name, value in expected["metrics"].items():
        assert_within(metrics[name].cpu(), torch.tensor(value), bound, name)
    assert_within(logits.grad.cpu(), expected["grad_student_logits"], GRADIENT["chunk", torch.float32], "gradient")
