"""The reference of `chain_topk`: the parts of every chunk's divergence from a teacher's largest logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.events import SideTokens
from xtoken_core.ops.chain.listed import TopKTeacher, listed_parts
from xtoken_core.ops.chain.reference import ChainOptions
from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import Op, bernoulli_kl, upcast


@dataclass(frozen=True)
class ChainTopKSettings:
    """Settings of a call.

    Attributes:
        max_chunks: `P`.
        student_vocab_size: The student's tokens, over which the likelihood of a chunk's own tokens is normalised; at
            least those of the tables, at most the width of the head.
        options: Terms to include.
        temperature: Divides the student's logits.
        least_mass: A chunk with a node at which the listed tokens have less of the teacher's probability has ALM's
            value (`tau` 1) instead of its inner part and its end.
        with_cross_entropy: True to return the student's cross-entropy on its whole head, too.
        generated: The form on text that the student has generated, which only the reference computes; None: all text
            is given.
    """

    max_chunks: int
    student_vocab_size: int
    options: ChainOptions = field(default_factory=ChainOptions)
    temperature: float = 1.0
    least_mass: float = 0.0
    with_cross_entropy: bool = True
    generated: Generated | None = None


class ChainTopKResult(NamedTuple):
    """The divergence and the cross-entropy.

    Attributes:
        start: `[B, P]`, KL at the chunk's start, in nats.
        inner: `[B, P]`, that of the nodes inside its tokens; ALM's value where too little mass is listed.
        end: `[B, P]`, that of the node after its last token.
        kept: `[B, P]`, the least fraction of the teacher's probability that its listed tokens have at a chunk's nodes;
            1 for a chunk without nodes. No gradient.
        losses: `[B, T_s]` cross-entropy in nats; None unless asked for.
        hits: `[B, T_s]`, True where the first guess is right; None unless asked for.
    """

    start: Tensor
    inner: Tensor
    end: Tensor
    kept: Tensor
    losses: Tensor | None = None
    hits: Tensor | None = None


def chain_topk(
    student_logits: Float[Tensor, "B T_s V_head"],
    log_probs: Float[Tensor, "B T_t k"],
    ids: Int[Tensor, "B T_t k"],
    tail: Float[Tensor, "B T_t"],
    own: Float[Tensor, "B T_t"],
    student: SideTokens,
    teacher: SideTokens,
    tables: ChainTables,
    settings: ChainTopKSettings,
) -> ChainTopKResult:
    """Compute the parts of every chunk's divergence, and `cross_entropy` on the student's whole head.

    Args:
        student_logits: The whole head; the divergence cuts it to the tables' tokens.
        log_probs: The teacher's log-probabilities of its listed tokens at the temperature; no gradient.
        ids: These tokens, distinct within a row; -1, or beyond the tables' tokens: an empty entry.
        tail: The teacher's mass of the tokens that are not listed.
        own: The teacher's log-probability at the temperature of the token that each position predicts.
        student: The student's tokens.
        teacher: The teacher's tokens.
        tables: Tables of the two tokenizers, on the logits' device.
        settings: Settings of the call.
    """
    student_logits = upcast(student_logits)  # once: the gradient has several parts, and is rounded once
    given = TopKTeacher(ids, log_probs, len(tables.teacher.root), tail)
    parts, kept = listed_parts(
        student_logits[..., : len(tables.student.root)],
        given,
        (student, teacher),
        settings.max_chunks,
        tables,
        settings.options,
        temperature=settings.temperature,
        generated=settings.generated,
    )
    vocabulary = student_logits[..., : settings.student_vocab_size]
    likely, _ = cross_entropy(vocabulary / settings.temperature, student.predicted)
    # ALM's likelihoods: the sum of the log-probabilities of a chunk's own tokens on each side.
    log_s = -_sum_by_chunk(likely, student.chunk, settings.max_chunks)
    log_t = _sum_by_chunk(own.to(log_s.dtype), teacher.chunk, settings.max_chunks)
    weak = kept < settings.least_mass
    start, (inner, end) = parts[0], parts[1:].masked_fill(weak, 0.0).unbind()
    inner = inner + torch.where(weak, bernoulli_kl(log_t, log_s), 0.0).to(inner.dtype)
    if not settings.with_cross_entropy:
        return ChainTopKResult(start, inner, end, kept)
    return ChainTopKResult(start, inner, end, kept, *cross_entropy(student_logits, student.predicted))


def _sum_by_chunk(values: Float[Tensor, "B T"], chunk: Int[Tensor, "B T"], max_chunks: int) -> Float[Tensor, "B P"]:
    """Return the sum of each chunk's values."""
    spare = torch.where((chunk >= 0) & (chunk < max_chunks), chunk, max_chunks)  # the last column is dropped
    return values.new_zeros(len(values), max_chunks + 1).scatter_add(1, spare, values)[:, :-1]


class NativeChainTopKOp(Op):
    """Reference backend: blocks of rows, computed again for the gradient."""

    reads_once = False
    """True if divergence and cross-entropy share one reading of the student's rows and one gradient."""

    forward = staticmethod(chain_topk)

    def prepare(self, tables: ChainTables) -> None:
        """Derive from the tables what a call needs; the reference waits for the device in every call."""
        tables.read_sizes()
