"""Masks and targets: the positions and chunks that count, by one set of rules for the loss and the collator.

A padded batch has a sample per row. A packed one has all of its samples in one row, and an index of the sample of every
token and pair beside it; the first token of a sample is predicted by none there, as in a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import EXACT_FILTERING_MODES, WHOLE_CHUNK_MODES, LossConfig, LossMode
from xtoken_core.ops.chunk_mean.reference import chunk_sizes

COMPARED_FIELDS = (schema.STUDENT_CHUNK_ID, schema.TEACHER_CHUNK_ID, schema.PAIR_VALID, schema.PAIR_IS_CORRECT)
"""Columns of an alignment by which a loss chooses its chunks, in the order of the arguments of `compared_chunks`."""


class SampleTokens(NamedTuple):
    """One model's own tokens of a micro-batch of N samples, and what counts of them.

    Attributes:
        ids: int64 token ids.
        token_mask: 1 for tokens to learn.
        sample_mask: Weight of each sample, 0 for samples to leave out.
        sample: Index of each token's sample; None: each row is a sample.
    """

    ids: Int[Tensor, "B T"]
    token_mask: Int[Tensor, "B T"]
    sample_mask: Float[Tensor, " N"]
    sample: Int[Tensor, "B T"] | None = None

    def weights(self) -> Float[Tensor, "B T"]:
        """Return the weight of each token."""
        return self.token_mask.float() * of_samples(self.sample_mask.float(), self.sample)

    def next_weights(self) -> Float[Tensor, "B T_minus_1"]:
        """Return the weight of each next-token prediction: position i counts as token i + 1 does."""
        weights = self.weights()[:, 1:]
        # In a packed row the first token of a sample is predicted by none, as in a row of its own.
        return weights if self.sample is None else weights * (self.sample[:, 1:] == self.sample[:, :-1])


def student_tokens(batch: Mapping[str, Tensor]) -> SampleTokens:
    """Return the student's own tokens of a batch."""
    ids, token_mask, sample_mask = (
        batch[field.name] for field in (schema.INPUT_IDS, schema.TOKEN_MASK, schema.SAMPLE_MASK)
    )
    return SampleTokens(ids, token_mask, sample_mask, batch.get(schema.STUDENT_SAMPLE.name))


def of_samples(values: Tensor, sample: Int[Tensor, "B T"] | None) -> Tensor:
    """Return each token's (or pair's) value of its sample, `[B, T]`, or `[B, 1]` where each row is a sample.

    Args:
        values: One per sample.
        sample: Index of each token's sample; None: each row is a sample.
    """
    return values.unsqueeze(1) if sample is None else values[sample]


def generated_tokens(batch: Mapping[str, Tensor]) -> Bool[Tensor, "B T_s"] | None:
    """Return the student's tokens in text that it has generated; None if the batch has no column of it.

    Args:
        batch: Holds `weights_version`, -1 for given text, where rows may be generated.
    """
    version = batch.get(schema.WEIGHTS_VERSION.name)
    if version is None:
        return None
    generated = of_samples(version >= 0, batch.get(schema.STUDENT_SAMPLE.name))
    return generated.expand(batch[schema.INPUT_IDS.name].shape)


def shifted_chunk_ids(chunk_id: Int[Tensor, "B T"], sample: Int[Tensor, "B T"] | None = None) -> Int[Tensor, "B T"]:
    """Return chunk ids moved from each token to the position that predicts it: one to the left.

    The last position of a sample predicts none of its tokens and gets -1.

    Args:
        chunk_id: Chunk of each token, -1 = none.
        sample: Index of each token's sample; None: each row is a sample.
    """
    following = chunk_id[:, 1:]
    if sample is not None:
        # Otherwise the last token of a sample would predict the first chunk of the next one.
        following = following.masked_fill(sample[:, 1:] != sample[:, :-1], -1)
    return torch.cat([following, torch.full_like(chunk_id[:, :1], -1)], dim=1)


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


def whole_chunks(
    chunk_id: Int[Tensor, "B T"], max_chunks: int, sample: Int[Tensor, "B T"] | None = None
) -> Bool[Tensor, "B P"]:
    """Return True for the chunks whose tokens are adjacent and all predicted: none is the first of its sample.

    Args:
        chunk_id: Chunk of each token as aligned, not shifted; -1 = none.
        max_chunks: `P`.
        sample: Index of each token's sample; None: each row is a sample.
    """
    # Tokens of no chunk go to the entries before the first chunk and behind the last one.
    group = (chunk_id + 1).clamp(min=0, max=max_chunks + 1)
    # 1 where a run of tokens of one chunk begins, 2 more at a token that nothing predicts: a whole chunk has 1 in all.
    begins = torch.full_like(chunk_id, 2)
    begins[:, 1:] = chunk_id[:, 1:] != chunk_id[:, :-1]
    if sample is not None:
        begins[:, 1:] += 2 * (sample[:, 1:] != sample[:, :-1])
    total = chunk_id.new_zeros(len(chunk_id), max_chunks + 2).scatter_add(1, group, begins)
    return total[:, 1:-1] == 1


def kept_chunk_ids(chunk_id: Int[Tensor, "B T"], kept: Bool[Tensor, "B P"]) -> Int[Tensor, "B T"]:
    """Return chunk ids with -1 instead of those that are not kept.

    Args:
        chunk_id: -1 = none.
        kept: By chunk.
    """
    # [B, P + 2]: False at both ends, which chunk -1 and any id beyond P read, without a branch.
    padded = torch.nn.functional.pad(kept, (1, 1))
    return torch.where(padded.gather(1, (chunk_id + 1).clamp(min=0, max=padded.shape[1] - 1)), chunk_id, -1)


def compared_chunks(
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    pair_valid: Bool[Tensor, "B P"],
    pair_is_correct: Bool[Tensor, "B P"],
    config: LossConfig,
    mode: LossMode,
    *,
    samples: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Bool[Tensor, "B P"]:
    """Return True for the chunks that a mode compares, masked samples included.

    Args:
        student_chunk_id: Chunk of each student token as aligned, not shifted.
        teacher_chunk_id: Likewise.
        pair_valid: False on padding.
        pair_is_correct: True if the pair is correct (see `xtoken_core.alignment.batch`).
        config: The run's loss settings.
        mode: The teacher's.
        samples: Index of the sample of each of the student's and of the teacher's tokens; None: each row is a sample.
    """
    P = pair_valid.shape[1]
    if mode in WHOLE_CHUNK_MODES:
        whole = whole_chunks(student_chunk_id, P, samples[0]) & whole_chunks(teacher_chunk_id, P, samples[1])
        return pair_valid & pair_is_correct & whole
    # By sizes after the shift: a chunk that only the first token of a sample carries has no position left.
    sides = zip((student_chunk_id, teacher_chunk_id), samples, strict=True)
    student, teacher = (chunk_sizes(shifted_chunk_ids(ids, sample), P) for ids, sample in sides)
    valid = valid_chunk_mask(student, teacher, pair_valid)
    exact_only = config.exact_token_match_only and mode in EXACT_FILTERING_MODES
    return valid & pair_is_correct if exact_only else valid


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
    # The loss's own rule, so that the step's denominator equals what its micro-batches add up to.
    return compared_chunks(*alignment, config, config.mode_of(teacher)).sum(dim=1)


def ce_token_counts(token_mask: Int[Tensor, "B T_s"]) -> Int[Tensor, " B"]:
    """Count what each sample adds to the cross-entropy's denominator, its sample mask taken as 1.

    Args:
        token_mask: 1 for tokens to learn.

    Returns:
        int64 counts of next-token predictions.
    """
    # Position i predicts token i + 1: a sample's first token is no prediction.
    return token_mask[:, 1:].sum(dim=1).long()


def loss_counts(config: LossConfig, same_tokenizer: Sequence[bool]) -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    """Return a function that counts `ce_tokens` and, per teacher with its own tokenizer, `kd_chunks` of a batch.

    Args:
        config: The run's loss settings.
        same_tokenizer: Per teacher of the run, True if it shares the student's tokenizer.
    """

    def counts(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {schema.CE_TOKENS.name: ce_token_counts(batch[schema.TOKEN_MASK.name])}
        for index, same in enumerate(same_tokenizer):
            if not same:
                student, of_teacher, *pairs = (batch[schema.field_name(field, index)] for field in COMPARED_FIELDS)
                counted = kd_chunk_counts(student, of_teacher, pairs[0], pairs[1], config, teacher=index)
                found[schema.field_name(schema.KD_CHUNKS, index)] = counted
        return found

    return counts


def predicted_ids(ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return the id that each position predicts; the last position predicts none, its 0 has no weight."""
    return torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)


def next_token_targets(batch: Mapping[str, Tensor]) -> Int[Tensor, "B T"]:
    """Return `predicted_ids` of the student's own tokens.

    Args:
        batch: Holds `input_ids`.
    """
    return predicted_ids(batch[schema.INPUT_IDS.name])
