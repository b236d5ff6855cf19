"""The frozen projection matrix `W` in the forms that ops read."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class ProjectionMatrix:
    """`W [V_s, V_t]` on one device, built once.

    Attributes:
        sparse: `W` as a coalesced sparse COO tensor, float32.
        transposed: `W^T` likewise.
        offsets: `[V_t + 1]` int64; the entries of teacher id `t` are `offsets[t] .. offsets[t + 1]` of the next two.
        sources: `[nnz]` int32 student ids, ascending within a teacher id.
        weights: `[nnz]` float32.
        slot_targets: `[slots, V_s]` int32; the same entries by student id, for the way back: teacher ids, ascending
            and to the front, -1 = empty slot.
        slot_weights: `[slots, V_s]` float32.
    """

    sparse: Tensor
    transposed: Tensor
    offsets: Int[Tensor, " V_t_1"]
    sources: Int[Tensor, " nnz"]
    weights: Float[Tensor, " nnz"]
    slot_targets: Int[Tensor, "slots V_s"]
    slot_weights: Float[Tensor, "slots V_s"]

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
        """Build from single entries; those outside the vocabularies are dropped, those of the same pair are added."""
        inside = (student_ids >= 0) & (student_ids < student_vocab_size)
        inside &= (teacher_ids >= 0) & (teacher_ids < teacher_vocab_size)
        pairs = torch.stack([teacher_ids[inside].long(), student_ids[inside].long()])
        size = (teacher_vocab_size, student_vocab_size)
        transposed = torch.sparse_coo_tensor(pairs, weights[inside].float(), size, check_invariants=True)
        # Sorted by teacher id, then student id: the order in which both backends add.
        transposed = transposed.coalesce()
        sparse = transposed.t().coalesce()
        slot_targets, slot_weights = _slots(sparse)
        return cls(
            sparse=sparse,
            transposed=transposed,
            offsets=_offsets(transposed.indices()[0], teacher_vocab_size),
            sources=transposed.indices()[1].int(),
            weights=transposed.values(),
            slot_targets=slot_targets,
            slot_weights=slot_weights,
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

    @classmethod
    def from_sparse(cls, matrix: Tensor, *, student_vocab_size: int, teacher_vocab_size: int) -> ProjectionMatrix:
        """Build from a sparse COO matrix `[rows, columns]`; entries outside the two vocabularies are dropped.

        Args:
            matrix: Weights of (student id, teacher id).
            student_vocab_size: `V_s`.
            teacher_vocab_size: `V_t`.
        """
        matrix = matrix.coalesce()
        student_ids, teacher_ids = matrix.indices()
        return cls.from_entries(
            student_ids,
            teacher_ids,
            matrix.values(),
            student_vocab_size=student_vocab_size,
            teacher_vocab_size=teacher_vocab_size,
        )

    def to(self, device: torch.device | str) -> ProjectionMatrix:
        """Return the matrix on another device; itself if it is already there."""
        if self.sparse.device == torch.device(device):
            return self
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self)}
        return ProjectionMatrix(**moved)


def _offsets(sorted_ids: Tensor, size: int) -> Tensor:
    counts = torch.bincount(sorted_ids, minlength=size)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _slots(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of each row as slots over rows: `[slots, rows]`, at least one slot."""
    rows, columns = sparse.indices()  # ascending by row, then by column: the matrix is coalesced
    offsets = _offsets(rows, sparse.shape[0])
    slot = torch.arange(len(rows), device=rows.device) - offsets[rows]  # [nnz] rank of each entry in its row
    shape = (int(slot.max()) + 1 if len(rows) else 1, sparse.shape[0])
    targets = torch.full(shape, -1, dtype=torch.int32, device=rows.device)
    weights = torch.zeros(shape, dtype=torch.float32, device=rows.device)
    return targets.index_put((slot, rows), columns.int()), weights.index_put((slot, rows), sparse.values())
