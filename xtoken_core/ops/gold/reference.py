"""The reference of `gold`, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from xtoken_core.ops.chunk_mean.reference import chunk_average_log_probs
from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import Op, kl_terms, upcast


@dataclass(frozen=True)
class TokenPartition:
    """Both vocabularies, split into the tokens they share and the rest. All int64.

    Attributes:
        common_student: Student ids with a counterpart, paired with the next field.
        common_teacher: Their teacher ids.
        uncommon_student: The other student ids, ascending.
        uncommon_teacher: The other teacher ids, ascending.
    """

    common_student: Int[Tensor, " c"]
    common_teacher: Int[Tensor, " c"]
    uncommon_student: Int[Tensor, " u_s"]
    uncommon_teacher: Int[Tensor, " u_t"]

    @property
    def student_vocab_size(self) -> int:
        """`V_s`."""
        return self.common_student.shape[0] + self.uncommon_student.shape[0]

    def to(self, device: torch.device | str) -> TokenPartition:
        """Copy the partition to another device."""
        return TokenPartition(
            self.common_student.to(device),
            self.common_teacher.to(device),
            self.uncommon_student.to(device),
            self.uncommon_teacher.to(device),
        )


@dataclass(frozen=True)
class GoldOptions:
    """Options of `gold`.

    Attributes:
        max_chunks: `P`.
        temperature: `T`.
        reverse: Weigh the common part by the student's distribution instead of the teacher's.
        uncommon_topk: Where the sorted lists are cut. None: nowhere, the shorter one counts as continued by zeros
            (universal logit distillation).
    """

    max_chunks: int
    temperature: float = 1.0
    reverse: bool = False
    uncommon_topk: int | None = None


class GoldResult(NamedTuple):
    """Results of `gold` per chunk; chunks with an empty side hold finite, meaningless values.

    Attributes:
        kl_common: KL over the common pairs in nats, without the factor `T^2`.
        l1_uncommon: L1 distance of the sorted uncommon probabilities, without the factor `T^2`.
        agrees: True if both sides' largest common entry is the same pair; False if there is none.
        mass: The teacher's mass `sum exp(L)` over its whole vocabulary; no gradient.
    """

    kl_common: Float[Tensor, "B P"]
    l1_uncommon: Float[Tensor, "B P"]
    agrees: Bool[Tensor, "B P"]
    mass: Float[Tensor, "B P"]


class GoldCrossEntropyResult(NamedTuple):
    """Results of `gold_cross_entropy`: the fields of `GoldResult`, and those of `cross_entropy` per position."""

    kl_common: Float[Tensor, "B P"]
    l1_uncommon: Float[Tensor, "B P"]
    agrees: Bool[Tensor, "B P"]
    mass: Float[Tensor, "B P"]
    losses: Float[Tensor, "B T_s"]
    hits: Bool[Tensor, "B T_s"]


def gold(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    partition: TokenPartition,
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    options: GoldOptions,
) -> GoldResult:
    """Compute the gold loss of every chunk.

    With `c(x)` the mean over a chunk's positions: `S = c(log_softmax(z_s/T))`, `L = c(log_softmax(z_t/T))`. Over the
    common pairs `sum exp(L_t) (L_t - S_s)`, reversed `sum exp(S_s) (S_s - L_t)`. Over the rest `exp(S)` and `exp(L)`,
    each sorted descending and cut to `n = min(|u_s|, |u_t|, uncommon_topk)`: `sum |difference|`. `0 * -inf = 0`.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: Cut to the teacher's vocabulary; no gradient is wanted for it.
        partition: Common pairs and the rest.
        student_chunk_id: Chunk of each student position, already shifted to the predicting position; -1 = none.
        teacher_chunk_id: Likewise.
        options: How to compare.
    """
    P, T = options.max_chunks, options.temperature
    log_s = torch.log_softmax(upcast(student_logits) / T, dim=-1)
    log_t = torch.log_softmax(upcast(teacher_logits) / T, dim=-1)
    student, _ = chunk_average_log_probs(log_s, student_chunk_id, P)  # [B, P, V_s]
    teacher, _ = chunk_average_log_probs(log_t, teacher_chunk_id, P)  # [B, P, V_t]
    common_s = student.index_select(-1, partition.common_student)  # [B, P, C], column i of both is pair i
    common_t = teacher.index_select(-1, partition.common_teacher)
    terms = kl_terms(common_s, common_t) if options.reverse else kl_terms(common_t, common_s)  # [B, P, C]
    rest_s = student.index_select(-1, partition.uncommon_student).exp()  # [B, P, u_s]
    rest_t = teacher.index_select(-1, partition.uncommon_teacher).exp()
    if common_s.shape[-1]:  # argmax refuses an empty dimension
        agrees = common_s.detach().argmax(-1) == common_t.detach().argmax(-1)
    else:
        agrees = torch.zeros(terms.shape[:2], dtype=torch.bool, device=terms.device)
    return GoldResult(
        terms.sum(-1), _sorted_l1(rest_s, rest_t, options.uncommon_topk), agrees, teacher.detach().exp().sum(-1)
    )


def gold_cross_entropy(
    student_logits: Float[Tensor, "B T_s V_head"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    partition: TokenPartition,
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    targets: Int[Tensor, "B T_s"],
    options: GoldOptions,
) -> GoldCrossEntropyResult:
    """Compute `gold` on the student's vocabulary and `cross_entropy` on its whole head, as one op with one gradient.

    Args:
        student_logits: The whole head; gold cuts it to the ids of the partition.
        teacher_logits: As for `gold`.
        partition: As for `gold`.
        student_chunk_id: As for `gold`.
        teacher_chunk_id: As for `gold`.
        targets: The id that each position predicts, in `[0, V_head)`; where there is none any id, with no upstream
            gradient.
        options: As for `gold`.
    """
    whole = upcast(student_logits)  # both gradients are added before they are rounded
    student = whole[..., : partition.student_vocab_size]
    divergence = gold(student, teacher_logits, partition, student_chunk_id, teacher_chunk_id, options)
    return GoldCrossEntropyResult(*divergence, *cross_entropy(whole, targets))


def _sorted_l1(a: Float[Tensor, "B P u_s"], b: Float[Tensor, "B P u_t"], cut: int | None) -> Float[Tensor, "B P"]:
    n = min(a.shape[-1], b.shape[-1])
    if cut is None:  # the shorter list is compared with zeros, so all of the longer one counts
        width = max(a.shape[-1], b.shape[-1])
        a, b = (functional.pad(_descending(x, x.shape[-1]), (0, width - x.shape[-1])) for x in (a, b))
    else:
        a, b = _descending(a, min(n, cut)), _descending(b, min(n, cut))
    return (a - b).abs().sum(-1)


def _descending(x: Tensor, n: int) -> Tensor:
    if n < x.shape[-1]:  # a top-k is cheaper than a sort of the whole vocabulary
        return x.topk(n, dim=-1, sorted=True).values
    return x.sort(dim=-1, descending=True, stable=True).values


class NativeGoldOp(Op):
    """Reference backend: float32 inside from the first operation on; the gradient in the logits' dtype."""

    forward = staticmethod(gold)


class NativeGoldCrossEntropyOp(Op):
    """Reference backend: the two references, one after the other."""

    forward = staticmethod(gold_cross_entropy)
