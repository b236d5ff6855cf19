"""Masks and targets: the positions and chunks that count, by one set of rules for the loss and the collator."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import EXACT_FILTERING_MODES, WHOLE_CHUNK_MODES, LossConfig, LossMode
from xtoken_core.ops.chunk_mean.reference import chunk_sizes


def shifted_chunk_ids(chunk_id: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return chunk ids moved from each token to the position that predicts it: one to the left, the last is -1.

    Args:
        chunk_id: Chunk of each token, -1 = none.
    """
    return torch.cat([chunk_id[:, 1:], torch.full_like(chunk_id[:, :1], -1)], dim=1)


def valid_chunk_mask(
    s_sizes: Float[Tensor, "B P"], t_sizes: Float[Tensor, "B P"], pair_valid: Bool[Tensor, "B P"]
) -> Bool[Tensor, "B P"]:
    """Return True where both sides of a chunk are non-empty and the pair is valid.

    Args:
        s_sizes: Student positions of each chunk.
        t_sizes: Teacher positions of each chunk.
        pair_valid: False on padding.
    """
    return (s_sizes > 0) & (t_sizes > 0) & pair_valid


def whole_chunks(chunk_id: Int[Tensor, "B T"], max_chunks: int) -> Bool[Tensor, "B P"]:
    """Return True for the chunks whose tokens are adjacent and all predicted: none is the first of its sample.

    Args:
        chunk_id: Chunk of each token as aligned, not shifted; -1 = none.
        max_chunks: `P`.
    """
    B, T = chunk_id.shape
    inside = (chunk_id >= 0) & (chunk_id < max_chunks)
    # Tokens of no chunk go to a spare entry, so that nothing depends on how many there are.
    group = torch.where(inside, chunk_id, max_chunks)
    spare = torch.zeros(B, max_chunks + 1, dtype=torch.int64, device=chunk_id.device)
    position = torch.arange(T, device=chunk_id.device).expand(B, T)
    size = spare.scatter_add(1, group, torch.ones_like(group))
    first = (spare + T).scatter_reduce(1, group, position, "amin")
    last = (spare - 1).scatter_reduce(1, group, position, "amax")
    return ((size > 0) & (last - first + 1 == size) & (first > 0))[:, :max_chunks]


def kept_chunk_ids(chunk_id: Int[Tensor, "B T"], kept: Bool[Tensor, "B P"]) -> Int[Tensor, "B T"]:
    """Return chunk ids with -1 instead of those that are not kept.

    Args:
        chunk_id: -1 = none.
        kept: By chunk.
    """
    P = kept.shape[1]
    inside = (chunk_id >= 0) & (chunk_id < P)
    padded = torch.cat([kept, kept.new_zeros(len(kept), 1)], dim=1)
    return torch.where(padded.gather(1, torch.where(inside, chunk_id, P)), chunk_id, -1)


def comparable_chunks(
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    pair_valid: Bool[Tensor, "B P"],
    pair_is_correct: Bool[Tensor, "B P"],
    *,
    exact_only: bool,
) -> Bool[Tensor, "B P"]:
    """Return True for the chunks that a loss compares, masked samples included.

    Args:
        student_chunk_id: Chunk of each student position after `shifted_chunk_ids`.
        teacher_chunk_id: Likewise.
        pair_valid: False on padding.
        pair_is_correct: True if the pair is correct (see `xtoken_core.alignment.batch`).
        exact_only: True to leave out pairs that are not correct.
    """
    P = pair_valid.shape[1]
    valid = valid_chunk_mask(chunk_sizes(student_chunk_id, P), chunk_sizes(teacher_chunk_id, P), pair_valid)
    return valid & pair_is_correct if exact_only else valid


def compared_chunks(
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    pair_valid: Bool[Tensor, "B P"],
    pair_is_correct: Bool[Tensor, "B P"],
    config: LossConfig,
    mode: LossMode,
) -> Bool[Tensor, "B P"]:
    """Return True for the chunks that a mode compares, masked samples included.

    Args:
        student_chunk_id: Chunk of each student token as aligned, not shifted.
        teacher_chunk_id: Likewise.
        pair_valid: False on padding.
        pair_is_correct: True if the pair is correct (see `xtoken_core.alignment.batch`).
        config: The run's loss settings.
        mode: The teacher's.
    """
    if mode in WHOLE_CHUNK_MODES:
        P = pair_valid.shape[1]
        whole = whole_chunks(student_chunk_id, P) & whole_chunks(teacher_chunk_id, P)
        return pair_valid & pair_is_correct & whole
    return comparable_chunks(
        shifted_chunk_ids(student_chunk_id),
        shifted_chunk_ids(teacher_chunk_id),
        pair_valid,
        pair_is_correct,
        exact_only=keeps_exact_only(config, mode),
    )


def keeps_exact_only(config: LossConfig, mode: LossMode) -> bool:
    """Return True if pairs that are not correct are left out in this mode."""
    return config.exact_token_match_only and mode in EXACT_FILTERING_MODES


def kd_chunk_counts(
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    pair_valid: Bool[Tensor, "B P"],
    pair_is_correct: Bool[Tensor, "B P"],
    config: LossConfig,
    *,
    teacher: int = 0,
) -> Int[Tensor, " B"]:
    """Count what each sample adds to a teacher's KD denominator: the chunks that its mode compares.

    Args:
        student_chunk_id: Chunk of each student token as aligned, not yet shifted.
        teacher_chunk_id: Likewise.
        pair_valid: False on padding.
        pair_is_correct: True if the pair is correct (see `xtoken_core.alignment.batch`).
        config: The run's loss settings.
        teacher: The teacher's number.

    Returns:
        int64 counts, with every sample's mask taken as 1.
    """
    alignment = student_chunk_id, teacher_chunk_id, pair_valid, pair_is_correct
    return compared_chunks(*alignment, config, config.mode_of(teacher)).sum(dim=1)


def next_token_mask(
    token_mask: Int[Tensor, "B T"], sample_mask: Float[Tensor, " B"] | None = None
) -> Float[Tensor, "B T_minus_1"]:
    """Return the weight of each next-token prediction: position i counts if token i + 1 does.

    Args:
        token_mask: 1 for tokens to learn.
        sample_mask: 0 for samples to leave out; None: none.
    """
    mask = token_mask[:, 1:].float()
    return mask if sample_mask is None else mask * sample_mask.float().unsqueeze(1)


def ce_token_counts(token_mask: Int[Tensor, "B T_s"]) -> Int[Tensor, " B"]:
    """Count what each sample adds to the cross-entropy's denominator, its sample mask taken as 1.

    Args:
        token_mask: 1 for tokens to learn.

    Returns:
        int64 counts of next-token predictions.
    """
    return next_token_mask(token_mask).sum(dim=1).long()


def predicted_ids(ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return the id that each position predicts; the last position predicts none, its 0 has no weight."""
    return torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)


def next_token_targets(batch: Mapping[str, Tensor]) -> Int[Tensor, "B T"]:
    """Return `predicted_ids` of the student's own tokens.

    Args:
        batch: Holds `input_ids`.
    """
    return predicted_ids(batch[schema.INPUT_IDS.name])
