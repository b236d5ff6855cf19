"""P-KL of a teacher given by its largest logits: the compared tokens, and all others as one more class."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import upcast
from xtoken_core.ops.p_kl.reference import PKLOptions, compared_chunks, teacher_log_probs
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.topk_logits import TopKLogits


def p_kl_with_rest(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher: TopKLogits,
    projection: ProjectionMatrix,
    columns: Int[Tensor, " K"],
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    options: PKLOptions,
) -> tuple[Float[Tensor, "B P"], Bool[Tensor, "B P"], Float[Tensor, "B P"]]:
    """Compute `ops.p_kl` over `columns` and one class of all other tokens; without others the class is left out.

    A token that a position does not list has an equal part of that position's rest.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher: The teacher's largest logits.
        projection: `W [V_s, V_t]`.
        columns: The compared teacher ids.
        student_chunk_id: Chunk of each student position, -1 = none.
        teacher_chunk_id: Likewise.
        options: Settings of the comparison; `gathered` and `overwrite` have no effect.

    Returns:
        `kl`, `agrees` and `mass` of `PKLResult`.
    """
    logits = upcast(student_logits)
    probabilities = torch.softmax(logits if options.temperature == 1.0 else logits / options.temperature, dim=-1)
    chunk_mean = get_op("chunk_mean", logits.device)
    q: Tensor = chunk_mean(probabilities, student_chunk_id, options.max_chunks)[0]  # [B, P, V_s]
    projected: Tensor = get_op("sparse_projection", q.device)(q, projection)  # [B, P, V_t]
    del logits, probabilities, q  # what the backward needs of them is kept there
    Q = projected.index_select(-1, columns)
    if len(columns) < teacher.vocab_size:
        others = projected.index_fill(-1, columns, 0.0).sum(-1, keepdim=True)
        Q = torch.cat([Q, others], dim=-1)  # [B, P, K + 1]
    scaled = column_log_probs(teacher, columns).to(Q.dtype)
    return compared_chunks(Q, teacher_log_probs(scaled, teacher_chunk_id, options), options)


def column_log_probs(teacher: TopKLogits, columns: Int[Tensor, " K"]) -> Float[Tensor, "B T W"]:
    """Return the log-probabilities of `columns`, then that of all other tokens if there are any.

    Args:
        teacher: The teacher's largest logits.
        columns: Tokens, distinct.
    """
    K, V = len(columns), teacher.vocab_size
    # [V + 1] slot of each token; the last entry is for empty entries of a list.
    index = columns.new_full((V + 1,), K).scatter(0, columns, torch.arange(K, device=columns.device))
    slot = index[teacher.columns]  # [B, T, k], K for tokens that are not compared
    log_probs = teacher.log_probs()
    inside = slot < K
    whole = teacher.log_equal_part().unsqueeze(-1).repeat(1, 1, K + 1).scatter(-1, slot, log_probs)
    if K == V:
        return whole[..., :K]
    unlisted = teacher.unlisted
    # Compared tokens that are not listed have their equal part in their own slot already.
    outside = (unlisted - (K - inside.sum(-1))) / unlisted.clamp(min=1)  # fraction of the unlisted tokens
    rest = torch.where(inside, 0.0, log_probs.exp()).sum(-1) + teacher.log_rest.exp() * outside
    whole[..., K] = rest.clamp(min=torch.finfo(rest.dtype).tiny).log()
    return whole
