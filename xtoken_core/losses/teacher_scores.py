"""Teachers' own losses and scores on a micro-batch: they weigh or select teachers, and weigh them against the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.losses.base import Loss
from xtoken_core.losses.common import CE_EPSILON, LossTeacher, NumberedBatch, masked_sum
from xtoken_core.losses.lazy_logits import Logits, map_positions
from xtoken_core.losses.masks import SampleTokens, kept_chunk_ids, next_token_targets, predicted_ids
from xtoken_core.losses.objective import Values
from xtoken_core.losses.token_blocks import BLOCK_ROWS
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import kl_terms, upcast
from xtoken_core.topk_logits import TopKLogits

Score = Literal["ce", "entropy", "max_prob"]
# 256 positions of 150,000 tokens are 150 MB in float32, and a log-softmax needs two of these.
FLOAT_ROWS = 256
"""Positions of a head whose float32 log-probabilities are in memory at once."""


def next_token_losses(logits: Logits, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Compute a teacher's loss at each position, in nats, at temperature 1 and full width; the last one has no meaning.

    Args:
        logits: The uncut head, `[B, T, V_m]`.
        ids: The tokens that it has read.
    """
    if isinstance(logits, TopKLogits):
        # The text's own tokens are sent with the largest logits, listed or not: this score is exact.
        return -logits.own
    op = get_op("cross_entropy", logits.device)
    return map_positions(lambda x, ids: op(x, ids)[0], logits, predicted_ids(ids), rows=BLOCK_ROWS)


def masked_cross_entropy(logits: Logits, tokens: SampleTokens) -> Float[Tensor, ""]:
    """Compute a teacher's mean next-token loss on its own tokens of the micro-batch, at temperature 1 and full width.

    Args:
        logits: The uncut head, `[B, T, V_m]`.
        tokens: The teacher's.
    """
    mask, losses = tokens.next_weights(), next_token_losses(logits, tokens.ids)[:, :-1]
    return (torch.where(mask > 0, losses, 0.0) * mask).sum() / (mask.sum() + CE_EPSILON)


class TextNats:
    """Losses of the student and of its teachers on the same text of a micro-batch, as metrics that add up over a step.

    The text is that of the chunks that a teacher is compared on; with the student's tokenizer that of the next tokens.

    Attributes:
        metrics: Per teacher `text_nats_t{i}` (the student's, after `observe`), `text_teacher_nats_t{i}` and
            `text_bytes_t{i}`; none of a custom loss that names no chunks.
    """

    @torch.no_grad()
    def __init__(
        self,
        losses: Sequence[Loss],
        batch: Mapping[str, Tensor],
        teacher_logits: Sequence[Logits],
        token_bytes: Float[Tensor, " V"],
    ) -> None:
        """Compute the teachers' part.

        Args:
            losses: One per teacher.
            batch: A padded or packed micro-batch.
            teacher_logits: Each teacher's, uncut.
            token_bytes: Length of each of the student's tokens.
        """
        batch = NumberedBatch(batch)
        lengths = token_bytes[next_token_targets(batch)]
        self.metrics: dict[str, Tensor] = {}
        self._tokens: dict[int, Tensor] = {}
        for loss, logits in zip(losses, teacher_logits, strict=True):
            index = loss.index
            if (tokens := _compared_tokens(loss, batch)) is not None:
                nats = next_token_losses(logits.detach(), loss.tokens(batch).ids)
                self.metrics[f"text_teacher_nats_t{index}"] = masked_sum(nats, tokens[1])
                self.metrics[f"text_bytes_t{index}"] = masked_sum(lengths, tokens[0])
                self._tokens[index] = tokens[0]

    def observe(self, values: Values) -> None:
        """Add the student's part; with a head in blocks the last call counts."""
        for index, tokens in self._tokens.items():
            self.metrics[f"text_nats_t{index}"] = masked_sum(values.losses.detach(), tokens)


def _compared_tokens(loss: Loss, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the student's and the teacher's positions that predict the text of a loss; None if it is not known."""
    if (view := loss.chunks(batch)) is not None:
        of_student, of_teacher = view.student_chunk_id, view.teacher_chunk_id
        return kept_chunk_ids(of_student, view.valid) >= 0, kept_chunk_ids(of_teacher, view.valid) >= 0
    if not loss.teacher.same_tokenizer:
        return None
    predicts = torch.nn.functional.pad(loss.tokens(batch).next_weights() > 0, (0, 1))
    return predicts, predicts


def teacher_score(kind: Score, logits: Logits, tokens: SampleTokens) -> Float[Tensor, ""]:
    """Compute a teacher's score on the micro-batch, higher for a better teacher; no gradient.

    Args:
        kind: `ce`: minus its masked next-token loss. `entropy`: minus the mean entropy of its predictions, at every
            unmasked token. `max_prob`: the mean of its largest probability there.
        logits: The uncut head, at temperature 1.
        tokens: The teacher's.
    """
    logits = logits.detach()
    if kind == "ce":
        return -masked_cross_entropy(logits, tokens)

    def per_row(x: Tensor, _: Tensor) -> Tensor:
        log_p = torch.log_softmax(upcast(x), dim=-1)
        return kl_terms(log_p, torch.zeros_like(log_p)).sum(-1) if kind == "entropy" else log_p.amax(-1).exp()

    if isinstance(logits, TopKLogits) and kind == "max_prob":
        per_position = (logits.values.amax(-1) - logits.log_z).exp()
    else:
        per_position = map_positions(per_row, logits, tokens.ids, rows=FLOAT_ROWS)
    mask = tokens.weights()
    return (torch.where(mask > 0, per_position, 0.0) * mask).sum() / (mask.sum() + CE_EPSILON)


def vocabulary_factors(teachers: Sequence[LossTeacher]) -> list[float]:
    """Return `log V_i / log min V` per teacher."""
    smallest = min(teacher.vocab_size for teacher in teachers)
    return [math.log(teacher.vocab_size) / math.log(smallest) for teacher in teachers]


def lowest_index_of_minimum(values: Float[Tensor, " n"]) -> Int[Tensor, ""]:
    """Return the index of the smallest value, the lowest on ties, as a tensor on the same device."""
    indices = torch.arange(values.shape[0], device=values.device)
    # Of equal values the lowest index on every backend, without a wait for the device.
    return torch.where(values == values.min(), indices, values.shape[0] - 1).min()
