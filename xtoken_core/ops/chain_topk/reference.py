"""The reference of `chain_topk`: the parts of every chunk's divergence from a teacher's largest logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.events import SideTokens
from xtoken_core.ops.chain.listed import TopKTeacher, listed_parts
from xtoken_core.ops.chain.reference import ChainOptions
from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import Op, upcast


@dataclass(frozen=True)
class ChainTopKSettings:
    """Settings of a call.

    Attributes:
        max_chunks: `P`.
        options: Terms to include.
        temperature: Divides the student's logits.
        with_cross_entropy: True to return the student's cross-entropy on its whole head, too.
        generated: The form on text that the student has generated; None: all text is given.
    """

    max_chunks: int
    options: ChainOptions = field(default_factory=ChainOptions)
    temperature: float = 1.0
    with_cross_entropy: bool = True
    generated: Generated | None = None


class ChainTopKResult(NamedTuple):
    """The divergence and the cross-entropy.

    Attributes:
        start: `[B, P]`, KL at the chunk's start, in nats.
        inner: `[B, P]`, that of the nodes inside its tokens.
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
    start, inner, end = parts.unbind()
    if not settings.with_cross_entropy:
        return ChainTopKResult(start, inner, end, kept)
    return ChainTopKResult(start, inner, end, kept, *cross_entropy(student_logits, student.predicted))


class NativeChainTopKOp(Op):
    """Reference backend: blocks of rows, computed again for the gradient."""

    reads_once = False
    """True if divergence and cross-entropy share one reading of the student's rows and one gradient."""

    forward = staticmethod(chain_topk)

    def prepare(self, tables: ChainTables) -> None:
        """Derive from the tables what a call needs; the reference waits for the device in every call."""
        tables.read_sizes()
