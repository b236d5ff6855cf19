"""The chain-rule divergence of aligned tokens, before any batch columns: the definition that tests compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from benchmarks.chain_tables import side_tokens
from xtoken_core.chain.tables import ChainTables
from xtoken_core.losses.masks import whole_chunks
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.listed import TopKTeacher, listed_parts
from xtoken_core.ops.chain.reference import BLOCK_BYTES, ChainOptions, ChainSettings, chain


@dataclass(frozen=True)
class ChainBatch:
    """The tokens of a micro-batch and their chunks, as aligned: nothing is shifted.

    Attributes:
        student_ids: `[B, T_s]` int64.
        teacher_ids: `[B, T_t]` int64.
        student_chunk_id: `[B, T_s]` int64, -1 = none.
        teacher_chunk_id: `[B, T_t]` int64.
        usable: `[B, P]` bool, chunks whose pair is correct.
    """

    student_ids: Int[Tensor, "B T_s"]
    teacher_ids: Int[Tensor, "B T_t"]
    student_chunk_id: Int[Tensor, "B T_s"]
    teacher_chunk_id: Int[Tensor, "B T_t"]
    usable: Bool[Tensor, "B P"]


def chain_divergence(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_t"] | TopKTeacher,
    batch: ChainBatch,
    tables: ChainTables,
    options: ChainOptions | None = None,
    *,
    temperature: float = 1.0,
    generated: Generated | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Float[Tensor, "B P"]:
    """Compute the divergence of every chunk in nats, with a gradient for the student.

    A chunk that one side begins with its very first token has no prediction of it and gives 0.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: Cut to the teacher's vocabulary, or its largest probabilities; no gradient.
        batch: Tokens and chunks.
        tables: Tables of the two tokenizers, on the logits' device.
        options: Terms to include; None: the defaults.
        temperature: Divides both sides' logits; not the log-probabilities of a top-k teacher.
        generated: The form on text that the student has generated; None: all text is given.
        block_bytes: Memory limit of the rows that are computed together, in bytes.

    Returns:
        float32, or float64 for such logits.
    """
    P = batch.usable.shape[1]
    chunk_ids = batch.student_chunk_id, batch.teacher_chunk_id
    usable = batch.usable & whole_chunks(chunk_ids[0], P) & whole_chunks(chunk_ids[1], P)
    student, teacher = (
        side_tokens(ids, chunk_id, usable)
        for ids, chunk_id in zip((batch.student_ids, batch.teacher_ids), chunk_ids, strict=True)
    )
    options = options or ChainOptions()
    named: dict[str, Any] = {"temperature": temperature, "generated": generated}
    if isinstance(teacher_logits, TopKTeacher):
        parts = listed_parts(
            student_logits, teacher_logits, (student, teacher), P, tables, options, block_bytes=block_bytes, **named
        ).parts
    else:
        settings = ChainSettings(P, options, with_cross_entropy=False, **named)
        result = chain(student_logits, teacher_logits, student, teacher, tables, settings, block_bytes=block_bytes)
        parts = torch.stack(result[:3])
    return parts.sum(0)
