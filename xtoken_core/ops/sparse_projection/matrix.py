"""The frozen projection matrix `W` in the forms that ops read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class ProjectionMatrix:
    """`W [V_s, V_t]` on one device, built once.

    Attributes:
        sparse: `W` as a coalesced sparse COO tensor, float32.
        offsets: `[V_t + 1]` int64; the entries of teacher id `t` are `offsets[t] .. offsets[t + 1]` of the next two.
        sources: `[nnz]` int32 student ids, ascending within a teacher id.
        weights: `[nnz]` float32.
    """

    sparse: Tensor
    offsets: Int[Tensor, " V_t_1"]
    sources: Int[Tensor, " nnz"]
    weights: Float[Tensor, " nnz"]

    @property
    def student_vocab_size(self) -> int:
        """`V_s`."""
        return int(self.sparse.shape[0])

    @property
    def teacher_vocab_size(self) -> int:
        """`V_t`."""
        return int(self.sparse.shape[1])

    @classmethod
    def from_entries(
        cls,
        student_ids: Int[Tensor, " n"],
        teacher_ids: Int[Tensor, " n"],
        weights: Float[Tensor, " n"],
        *,
        student_vocab_size: int,
        teacher_vocab_size: int,
    ) -> ProjectionMatrix:
        """Build from single entries; those outside the two vocabularies are dropped, equal places are added."""
        inside = (student_ids >= 0) & (student_ids < student_vocab_size)
        inside &= (teacher_ids >= 0) & (teacher_ids < teacher_vocab_size)
        places = torch.stack([teacher_ids[inside].long(), student_ids[inside].long()])
        size = (teacher_vocab_size, student_vocab_size)
        transposed = torch.sparse_coo_tensor(places, weights[inside].float(), size, check_invariants=True)
        transposed = transposed.coalesce()
        teacher, student = transposed.indices()
        counts = torch.bincount(teacher, minlength=teacher_vocab_size)
        return cls(
            sparse=transposed.t().coalesce(),
            offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            sources=student.int(),
            weights=transposed.values(),
        )

    @classmethod
    def from_topk(
        cls,
        indices: Int[Tensor, "rows k"],
        likelihoods: Float[Tensor, "rows k"],
        *,
        student_vocab_size: int,
        teacher_vocab_size: int,
    ) -> ProjectionMatrix:
        """Build from the dense top-k form; `-1` marks an empty slot.

        Args:
            indices: Teacher ids of each student row.
            likelihoods: Their weights.
            student_vocab_size: `V_s`; rows beyond are dropped, missing ones are empty.
            teacher_vocab_size: `V_t`; ids beyond are dropped.
        """
        rows, k = indices.shape
        student = torch.arange(rows, device=indices.device).unsqueeze(1).expand(rows, k)
        return cls.from_entries(
            student.reshape(-1),
            indices.reshape(-1),
            likelihoods.reshape(-1),
            student_vocab_size=student_vocab_size,
            teacher_vocab_size=teacher_vocab_size,
        )

    def to(self, device: torch.device | str) -> ProjectionMatrix:
        """The same matrix on another device; itself if it is there already."""
        if self.sparse.device == torch.device(device):
            return self
        return ProjectionMatrix(
            sparse=self.sparse.to(device),
            offsets=self.offsets.to(device),
            sources=self.sources.to(device),
            weights=self.weights.to(device),
        )
