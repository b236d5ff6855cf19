"""The loss, its parts and its gradient against cases computed by the method's public implementation."""

import os
from pathlib import Path

import pytest
import torch

from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection, LossTeacher

DEFAULT = Path(__file__).parents[2] / "data" / "loss_vectors.pt"
CASES = torch.load(os.environ.get("XTOKEN_LOSS_VECTORS", DEFAULT), weights_only=True)


def batch_of(inputs: dict) -> dict[str, torch.Tensor]:
    alignment = ("student_chunk_id", "teacher_chunk_id", "pair_valid", "pair_is_correct")
    return {name: inputs[name] for name in ("input_ids", "token_mask", "sample_mask")} | {
        f"alignment_{name}": inputs[name] for name in alignment
    }


def loss_of(case: dict, device: torch.device | str = "cpu") -> CrossTokenizerDistillationLoss:
    inputs = case["inputs"]
    teacher = LossTeacher(inputs["teacher_vocab_size"], inputs["projection_indices"], inputs["projection_likelihoods"])
    return CrossTokenizerDistillationLoss(
        LossConfig(**case["config"]),
        student_vocab_size=inputs["student_logits"].shape[-1],
        teachers=[teacher],
        device=device,
    )


@pytest.mark.parametrize("identity_head", [False, True], ids=["logits", "hidden_states"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_loss_parts_and_gradient_match(case, identity_head):
    inputs, expected = case["inputs"], case["expected"]
    logits = inputs["student_logits"].clone().requires_grad_()
    both = logits, inputs["teacher_logits"]
    student, teacher = (HeadProjection(x, torch.eye(x.shape[-1])) for x in both) if identity_head else both
    step = {name: inputs.get(name) for name in ("global_valid_toks", "global_valid_chunks")}
    loss, metrics = loss_of(case)(batch_of(inputs), student, [teacher], **step)
    loss.backward()

    parts = {"the loss itself": (loss.item(), expected["loss"])}
    parts |= {name: (metrics[name].item(), value) for name, value in expected["metrics"].items()}
    wrong = {n: (a, b) for n, (a, b) in parts.items() if not abs(a - b) <= 1e-5 * abs(b) + 1e-7}
    assert not wrong
    gradient = expected["grad_student_logits"]
    assert (logits.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max()
