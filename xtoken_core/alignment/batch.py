"""AlignmentBatch: which tokens of the student and of the teacher cover the same span of the source text.

A pair is *correct* if both sides' tokens cover the same span of the source text and each side's tokens spell its own
normaliser's output for that span. It is *exact* if, additionally, the two spellings are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

PREFIX = "alignment_"


@dataclass(frozen=True)
class AlignmentBatch:
    """The chunks of `B` samples, dense-padded; a chunk is a pair of token groups that belong together.

    Attributes:
        pair_valid: `[B, P]` bool, False on padding.
        pair_is_correct: `[B, P]` bool, True if the pair is correct.
        student_exact_partition_mask: `[B, T_s]` bool, token of an exact pair with one token on each side.
        teacher_exact_partition_mask: `[B, T_t]` bool, likewise.
        student_chunk_id: `[B, T_s]` int64, index of the token's chunk, -1 = none.
        teacher_chunk_id: `[B, T_t]` int64, likewise.
        num_chunks: `[B]` int64, valid chunks.
    """

    pair_valid: Bool[Tensor, "B P"]
    pair_is_correct: Bool[Tensor, "B P"]
    student_exact_partition_mask: Bool[Tensor, "B T_s"]
    teacher_exact_partition_mask: Bool[Tensor, "B T_t"]
    student_chunk_id: Int64[Tensor, "B T_s"]
    teacher_chunk_id: Int64[Tensor, "B T_t"]
    num_chunks: Int64[Tensor, " B"]

    def flat(self, teacher: int | None = None) -> dict[str, Tensor]:
        """Return the fields under their transport names, `alignment_*` or `alignment_{teacher}_*`."""
        return {flat_name(field.name, teacher): getattr(self, field.name) for field in fields(self)}


class Aligner(Protocol):
    """Part of a `TokenAligner` that the collator uses."""

    def align(
        self,
        student_ids: Tensor,
        teacher_ids: Tensor,
        *,
        student_attention_mask: Tensor | None,
        teacher_attention_mask: Tensor | None,
        texts: Sequence[str | None] | None = None,
    ) -> AlignmentBatch:
        """Cut both tokenizations of `B` samples into chunks."""


def flat_name(field: str, teacher: int | None = None) -> str:
    """Return the transport name of a field.

    >>> flat_name("pair_valid"), flat_name("num_chunks", 1)
    ('alignment_pair_valid', 'alignment_1_num_chunks')
    """
    return f"{PREFIX}{field}" if teacher is None else f"{PREFIX}{teacher}_{field}"


def alignment_from_flat_batch(data: Mapping[str, Any], teacher: int | None = None) -> AlignmentBatch:
    """Build an `AlignmentBatch` from the flat `alignment_*` fields of a batch.

    The names follow the fields of `AlignmentBatch`, so the two cannot drift apart.

    Args:
        data: A batch with the transport names of `AlignmentBatch.flat`.
        teacher: The teacher's index where a run has several.

    Raises:
        KeyError: A field is missing from the batch.
    """
    names = {field.name: flat_name(field.name, teacher) for field in fields(AlignmentBatch)}
    if missing := [name for name in names.values() if name not in data]:
        raise KeyError(f"the batch lacks {', '.join(missing)}")
    return AlignmentBatch(**{field: torch.as_tensor(data[name]) for field, name in names.items()})
