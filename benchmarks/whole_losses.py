"""Whole losses as the trainer calls them, forward and backward in one: divergence, cross-entropy, accuracy, metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher
from xtoken_core.ops.registry import BACKENDS, ENVIRONMENT

CONFIGS = {
    "p_kl_loss": LossConfig(vocab_topk=8192),
    "p_kl_loss_in_place": LossConfig(vocab_topk=8192, gradient_in_place=True),
    "p_kl_full_vocabulary_loss": LossConfig(vocab_topk=None),
    "gold_loss": LossConfig(mode="gold"),
    "h_kl_loss": LossConfig(mode="h_kl"),
}
"""The settings of every row."""
OPS_OF = {
    "p_kl_loss": ("p_kl", "p_kl_cross_entropy", "select_topk_columns"),
    "p_kl_loss_in_place": ("p_kl", "p_kl_cross_entropy", "select_topk_columns"),
    "p_kl_full_vocabulary_loss": ("p_kl", "p_kl_cross_entropy"),
    "gold_loss": ("gold", "gold_cross_entropy"),
    "h_kl_loss": ("gold", "gold_cross_entropy"),
}
"""The ops whose tests must have passed before a row is timed."""


def projection_with_common_tokens(
    student_vocab: int, teacher_vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draw four entries a row; a quarter of the smaller vocabulary has a certain counterpart, another a likely one."""
    generator = torch.Generator(device).manual_seed(0)
    indices = torch.randint(teacher_vocab, (student_vocab, 4), device=device, generator=generator)
    weights = torch.rand((student_vocab, 4), device=device, generator=generator).sort(1, descending=True).values
    weights = weights / weights.sum(1, keepdim=True) * 0.99
    quarter = min(student_vocab, teacher_vocab) // 4
    ids = torch.arange(2 * quarter, device=device)
    indices[: 2 * quarter, 0] = ids
    indices[:quarter, 1:] = -1
    certain = torch.tensor([1.0, 0.0, 0.0, 0.0], device=device)
    likely = torch.tensor([0.7, 0.1, 0.1, 0.1], device=device)
    weights[:quarter], weights[quarter : 2 * quarter] = certain, likely
    return indices, weights


def batch_of(ids: Tensor, sides: Sequence[Tensor], most: int) -> dict[str, Tensor]:
    """Return the columns of a batch with `most` chunks a sample."""
    valid = torch.arange(most, device=ids.device) < sides[0].amax(1, keepdim=True) + 1
    return {
        "input_ids": ids,
        "token_mask": torch.ones_like(ids),
        "sample_mask": torch.ones(len(ids), device=ids.device),
        "alignment_student_chunk_id": sides[0],
        "alignment_teacher_chunk_id": sides[1],
        "alignment_pair_valid": valid,
        "alignment_pair_is_correct": valid,
    }


def whole_loss(
    name: str, backend: str, tokens: int, vocabularies: tuple[int, int], device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of both sides' logits that gives the loss of one sample with every op on one backend.

    Args:
        name: One of `CONFIGS`.
        backend: `reference`, or `triton` where an op has it.
        tokens: Positions on each side; every position is a chunk.
        vocabularies: The student's and the teacher's.
        device: Where the logits are.
    """
    os.environ[ENVIRONMENT] = ",".join(f"{op}={backend}" for op in OPS_OF[name] if backend in BACKENDS[op])
    indices, weights = projection_with_common_tokens(*vocabularies, device)
    loss = CrossTokenizerDistillationLoss(
        CONFIGS[name],
        student_vocab_size=vocabularies[0],
        teachers=[LossTeacher(vocabularies[1], indices.cpu(), weights.cpu())],
        device=device,
    )
    ids = torch.arange(tokens, device=device).unsqueeze(0)
    batch = batch_of(ids % vocabularies[0], (ids, ids), tokens)
    return lambda student, teacher: loss(batch, student, [teacher])[0]
