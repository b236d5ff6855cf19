"""The reference of `p_kl`, in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.ops.chunk_mean.reference import chunk_average_log_probs
from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import EPSILON, Op, kl_terms, upcast
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.sparse_projection.reference import NativeSparseProjectionOp


@dataclass(frozen=True)
class PKLOptions:
    """Options of `p_kl`.

    Attributes:
        max_chunks: `P`.
        temperature: `T`.
        reverse: Weigh by the student's distribution instead of the teacher's.
        teacher_average: How a chunk's teacher positions are averaged: their log-probabilities or probabilities.
        gathered: True if the teacher's logits hold the compared columns alone, in their order.
        overwrite: True if a backend may overwrite the student's logits with their gradient.
    """

    max_chunks: int
    temperature: float = 1.0
    reverse: bool = False
    teacher_average: Literal["log_prob", "prob"] = "log_prob"
    gathered: bool = False
    overwrite: bool = False


class PKLResult(NamedTuple):
    """Results of `p_kl` per chunk; chunks with an empty side hold finite, meaningless values.

    Attributes:
        kl: The divergence in nats, without the factor `T^2`.
        agrees: True if both sides' largest entry among the compared columns is the same.
        mass: The teacher's mass `sum exp(L)`; no gradient.
        unnamed: The teacher's mean probability, within the compared tokens, of those that no row of the projection
            names; no gradient.
    """

    kl: Float[Tensor, "B P"]
    agrees: Bool[Tensor, "B P"]
    mass: Float[Tensor, "B P"]
    unnamed: Float[Tensor, "B P"]


class PKLCrossEntropyResult(NamedTuple):
    """Results of `p_kl_cross_entropy`: the fields of `PKLResult`, and those of `cross_entropy` per position."""

    kl: Float[Tensor, "B P"]
    agrees: Bool[Tensor, "B P"]
    mass: Float[Tensor, "B P"]
    losses: Float[Tensor, "B T_s"]
    hits: Bool[Tensor, "B T_s"]
    unnamed: Float[Tensor, "B P"]


def p_kl(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_m"],
    projection: ProjectionMatrix,
    columns: Int[Tensor, " K"],
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    options: PKLOptions,
) -> PKLResult:
    """Compute P-KL of every chunk.

    With `c(x)` the mean over a chunk's positions and `eps = 1e-10`: `q = softmax(z_s/T) W[:, K]`, `Q = c(q)`
    normalised by `sum Q + eps`; `L = c(log_softmax(z_t[K]/T))`, or the logarithm of the mean probability. The chunk's
    value is `sum_K exp(L) (L - log(Q + eps))`, reversed `sum_K exp(log Q) (log Q - L)`. The mean over positions is
    taken before the (linear) projection, which is then done once per chunk.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: At least as wide as the largest of `columns`, or `K` wide where they are gathered already; no
            gradient is wanted for it.
        projection: `W [V_s, V_t]`.
        columns: The compared teacher ids.
        student_chunk_id: Chunk of each student position, already shifted to the predicting position; -1 = none.
        teacher_chunk_id: Likewise.
        options: Settings of the comparison.
    """
    P, T = options.max_chunks, options.temperature
    # q [B, P, V_s], Q [B, P, K]
    q, _ = chunk_average_log_probs(torch.softmax(upcast(student_logits) / T, dim=-1), student_chunk_id, P)
    # c(q W) = c(q) W: the product is taken once per chunk, not per position.
    Q = NativeSparseProjectionOp()(q, projection).index_select(-1, columns)
    compared = teacher_logits if options.gathered else teacher_logits.index_select(-1, columns)
    scaled = upcast(compared.detach()) / T
    log_p = teacher_log_probs(scaled, teacher_chunk_id, options)
    # Columns without an entry of the projection: what the teacher has there no student can reach.
    missing = (projection.offsets.diff() == 0)[columns].to(scaled.dtype)
    mass = torch.softmax(scaled, dim=-1) @ missing  # [B, T_t]
    unnamed, _ = chunk_average_log_probs(mass.unsqueeze(-1), teacher_chunk_id, P)
    return PKLResult(*compared_chunks(Q, log_p, options), unnamed.squeeze(-1))


def compared_chunks(
    Q: Float[Tensor, "B P K"], log_p: Float[Tensor, "B P K"], options: PKLOptions
) -> tuple[Float[Tensor, "B P"], Bool[Tensor, "B P"], Float[Tensor, "B P"]]:
    """Compute the divergence from both sides' values of each chunk.

    Args:
        Q: The student's projected probabilities, not normalised.
        log_p: The teacher's averages.
        options: Settings of the comparison.

    Returns:
        `kl`, `agrees` and `mass` of `PKLResult`.
    """
    log_q = torch.log(Q / (Q.sum(-1, keepdim=True) + EPSILON) + EPSILON)
    # A token with probability 0 on both sides costs nothing, although eps gives the student a little of it.
    log_p = log_p.masked_fill((Q == 0) & (log_p == -torch.inf), math.log(EPSILON))
    terms = kl_terms(log_q, log_p) if options.reverse else kl_terms(log_p, log_q)
    agrees = Q.detach().argmax(-1) == log_p.detach().argmax(-1)
    return terms.sum(-1), agrees, log_p.detach().exp().sum(-1)


def p_kl_cross_entropy(
    student_logits: Float[Tensor, "B T_s V_head"],
    teacher_logits: Float[Tensor, "B T_t V_m"],
    projection: ProjectionMatrix,
    columns: Int[Tensor, " K"],
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    targets: Int[Tensor, "B T_s"],
    options: PKLOptions,
) -> PKLCrossEntropyResult:
    """Compute `p_kl` on the student's vocabulary and `cross_entropy` on its whole head, as one op with one gradient.

    Args:
        student_logits: The whole head; P-KL cuts it to the projection's rows.
        teacher_logits: As for `p_kl`.
        projection: As for `p_kl`.
        columns: As for `p_kl`.
        student_chunk_id: As for `p_kl`.
        teacher_chunk_id: As for `p_kl`.
        targets: The id that each position predicts, in `[0, V_head)`; where there is none any id, with no upstream
            gradient.
        options: As for `p_kl`.
    """
    whole = upcast(student_logits)  # both gradients are added before they are rounded
    student = whole[..., : projection.student_vocab_size]
    divergence = p_kl(student, teacher_logits, projection, columns, student_chunk_id, teacher_chunk_id, options)
    kl, agrees, mass, unnamed = divergence
    losses, hits = cross_entropy(whole, targets)
    return PKLCrossEntropyResult(kl, agrees, mass, losses, hits, unnamed)


def teacher_log_probs(
    scaled: Float[Tensor, "B T_t K"], chunk_id: Int[Tensor, "B T_t"], options: PKLOptions
) -> Float[Tensor, "B P K"]:
    """Return the average over each chunk's teacher positions.

    Args:
        scaled: Logits of the compared tokens, divided by the temperature.
        chunk_id: Chunk of each position.
        options: Settings of the comparison.
    """
    P = options.max_chunks
    if options.teacher_average == "log_prob":
        return chunk_average_log_probs(torch.log_softmax(scaled, dim=-1), chunk_id, P)[0]
    return torch.log(chunk_average_log_probs(torch.softmax(scaled, dim=-1), chunk_id, P)[0] + EPSILON)


class NativePKLOp(Op):
    """Reference backend: float32 inside from the first operation on; the gradient in the logits' dtype."""

    forward = staticmethod(p_kl)


class NativePKLCrossEntropyOp(Op):
    """Reference backend: the two references, one after the other."""

    overwrites = False
    """True if the backend uses `options.overwrite`."""

    forward = staticmethod(p_kl_cross_entropy)
