"""Importance weights of stale completions: how much likelier the weights of now make what precedes a chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core import schema
from xtoken_core.errors import InputError
from xtoken_core.losses.common import ChunkView
from xtoken_core.losses.masks import generated_tokens, student_tokens


@torch.no_grad()
def chunk_weights(
    batch: Mapping[str, Tensor], losses: Float[Tensor, "B T"], view: ChunkView, cap: float
) -> Float[Tensor, "B P"]:
    """Return the weight of every chunk: 1 in given text, and before the first sampled token.

    The mean of `w f(prefix)` over completions of the old weights is that of `f(prefix)` over those of the new ones, if
    `w` is the ratio of both probabilities of the prefix. The cap bounds its variance.

    Args:
        batch: A padded or packed micro-batch with `sampled_log_probs`.
        losses: Nats of the token that each position predicts, by the weights of now.
        view: A teacher's alignment at predicting positions.
        cap: Largest weight.

    Raises:
        InputError: The batch lacks the log-probabilities of its tokens.
    """
    sampled = batch.get(schema.SAMPLED_LOG_PROBS.name)
    if sampled is None:
        raise InputError(
            f"loss.importance_cap reads the column {schema.SAMPLED_LOG_PROBS.name}, which the batch does not have: add "
            "it, or unset importance_cap"
        )
    tokens = student_tokens(batch)
    generated = generated_tokens(batch)
    assert generated is not None
    # Only sampled tokens have a probability under the old weights; a prompt was given.
    counted = (tokens.next_weights() > 0) & generated[:, 1:]
    ratios = torch.where(counted, -losses[:, :-1] - sampled[:, 1:].to(losses.dtype), 0.0)
    ratios = torch.cat([ratios, torch.zeros_like(losses[:, :1])], 1)  # [B, T], of the token that a position predicts
    # Exclusive: the prefix of a position ends before the token that it predicts.
    before = ratios.cumsum(1) - ratios
    position = torch.arange(losses.shape[1], device=losses.device).expand(losses.shape)
    if tokens.sample is not None:  # a packed row holds several samples
        count = len(batch[schema.SAMPLE_MASK.name])
        sample = tokens.sample.clamp(min=0)
        # [1, N] first position of each sample, whose running sum is taken off below.
        starts = position.new_full((1, count), losses.shape[1] - 1).scatter_reduce(1, sample, position, "amin")
        before = before - before.gather(1, starts).gather(1, sample)
    P = view.max_chunks
    inside = (view.student_chunk_id >= 0) & (view.student_chunk_id < P)
    # Positions without a chunk go to an extra one, P, which is cut off at the end.
    chunk = torch.where(inside, view.student_chunk_id, P)
    first = position.new_full((len(chunk), P + 1), losses.shape[1] - 1).scatter_reduce(1, chunk, position, "amin")
    # Clamped as a logarithm: a long completion's ratio overflows before it could be capped.
    return before.gather(1, first[:, :P]).clamp(max=math.log(cap)).exp()
