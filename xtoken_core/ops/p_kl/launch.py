"""The launches behind the Triton backends of `p_kl`: buffers, grids, and the sizes of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.ops.chunks import ChunkPositions
from xtoken_core.ops.p_kl import kernels
from xtoken_core.ops.p_kl.reference import PKLOptions
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.tile_kernels import log_sum_exp_kernel, sum_kernel
from xtoken_core.ops.triton_support import power_of_2

PADDING = 64
"""Every buffer's rows are this many positions (or chunks) or a multiple, whatever the batch: layouts stay the same."""
STUDENT_TILE = (64, 256)
TEACHER_TILE = (64, 64)
GRADIENT_TILE = (32, 128)
"""Positions and columns of a tile of logits."""
PROJECT_TILE = (64, 16)
PROJECT_AHEAD = 4
CHUNK_TILE = (64, 8)
CHUNK_BWD_TILE = (64, 32)
"""Positions (chunks) and compared columns of a tile, and projection entries that are loaded at once."""
PER = 256
"""Most compared columns of one program of the two kernels that go through several tiles."""
EAGER_SLOTS = 2
"""Projection entries of a student token that the gradient looks up without asking how many there are."""
PARTS, ROWS = 64, 16
"""How many parts and rows a program combines at once."""


class Slots(NamedTuple):
    """The projection's entries into the compared columns, by student token; `counts[v]` slots of column v are filled.

    Attributes:
        places: `[slots, V_s]` int32 places within the compared columns, -1 = empty.
        weights: `[slots, V_s]` float32.
        counts: `[V_s]` int32.
    """

    places: Tensor
    weights: Tensor
    counts: Tensor


@dataclass
class StudentRows:
    """What one reading of the student's rows gives. Vectors are padded, except `losses` and `hits`, `[B, T_s]`."""

    transposed: Tensor
    lse: Tensor
    head_lse: Tensor
    losses: Tensor | None
    hits: Tensor | None


class TeacherRows(NamedTuple):
    """The teacher's logits at the compared columns, `[K, padded rows]`, and their log-sum-exps."""

    gathered: Tensor
    lse: Tensor


@dataclass
class ChunkResults:
    """Per chunk: what the op returns, `[B, P]`, and what the backward needs."""

    kl: Tensor
    agrees: Tensor
    mass: Tensor
    norm: Tensor
    inner: Tensor


def padded(n: int) -> int:
    """`n` rounded up to a multiple of PADDING."""
    return (n + PADDING - 1) // PADDING * PADDING


class Comparison:
    """One call's teacher, projection and alignment, and the launches over them."""

    def __init__(
        self,
        teacher_logits: Tensor,
        projection: ProjectionMatrix,
        columns: Tensor,
        student: ChunkPositions,
        teacher: ChunkPositions,
        options: PKLOptions,
    ) -> None:
        """Args are the op's; logits have a contiguous last dimension, `columns` is contiguous."""
        self.z_t, self.projection, self.columns = teacher_logits, projection, columns
        self.student, self.teacher, self.options = student, teacher, options
        self.prob = options.teacher_average == "prob"
        self.scale = 1.0 / options.temperature
        self.device = teacher_logits.device
        self.K, self.V = columns.shape[0], projection.student_vocab_size
        self.student_padded, self.teacher_padded = (padded(side.chunk.shape[0]) for side in (student, teacher))
        self.C = student.first.shape[0] - 1
        self.per = min(PER, max(PROJECT_TILE[1], CHUNK_TILE[1], power_of_2(self.K)))

    def _float(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def slots(self) -> Slots:
        """The projection cut to the compared columns."""
        W = self.projection
        ids = torch.arange(self.K, dtype=torch.int32, device=self.device)
        place = torch.full((W.teacher_vocab_size,), -1, dtype=torch.int32, device=self.device)
        place.scatter_(0, self.columns, ids)
        counts = torch.empty(self.V, dtype=torch.int32, device=self.device)
        slots = Slots(torch.empty_like(W.slot_targets), torch.empty_like(W.slot_weights), counts)
        block = min(1024, power_of_2(self.V))
        kernels.p_kl_slots_kernel[(triton.cdiv(self.V, block),)](
            W.slot_targets, W.slot_weights, place, *slots, self.V, W.slot_targets.shape[0], block
        )
        return slots

    def student_rows(self, logits: Tensor, counts: Tensor, targets: Tensor | None) -> StudentRows:
        """Read every row once: log-sum-exps, the ids that project into K, and with targets the cross-entropy."""
        B, T, V_head = logits.shape
        head = targets is not None and (V_head != self.V or self.scale != 1.0)
        width = self.student_padded
        rows, columns = STUDENT_TILE[0], min(STUDENT_TILE[1], power_of_2(V_head))
        parts = triton.cdiv(V_head, columns)
        transposed = torch.empty((self.V, width), dtype=logits.dtype, device=self.device)
        sums = self._float(2, parts, width)
        of_head = self._float(2, parts, width) if head else sums
        strides = logits.stride(0), logits.stride(1), width
        kernels.p_kl_student_kernel[(parts, width // rows)](
            logits, counts, transposed, *sums, *of_head, B * T, T, self.V, V_head, *strides, self.scale,
            head, rows, columns, num_warps=8,
        )  # fmt: skip
        lse, head_lse = self._float(width), self._float(width)
        losses = self._float(B, T)
        hits = torch.empty((B, T), dtype=torch.bool, device=self.device)
        kernels.p_kl_student_rows_kernel[(width // ROWS,)](
            logits, lse if targets is None else targets, *sums, *of_head, lse, head_lse, losses, hits,
            B * T, T, V_head, parts, *strides, targets is not None, PARTS, ROWS, columns,
        )  # fmt: skip
        if targets is None:
            return StudentRows(transposed, lse, lse, None, None)
        return StudentRows(transposed, lse, head_lse if head else lse, losses, hits)

    def project(self, transposed: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """`[K, padded rows]` projected probabilities and their sums over K."""
        W, width = self.projection, self.student_padded
        rows, columns = PROJECT_TILE
        parts = triton.cdiv(self.K, self.per)
        projected, partial, sums = self._float(self.K, width), self._float(parts, width), self._float(width)
        kernels.p_kl_project_kernel[(parts, width // rows)](
            transposed, lse, self.columns, W.offsets, W.sources, W.weights, projected, partial,
            self.K, width, self.scale, self.per, columns, rows, PROJECT_AHEAD,
        )  # fmt: skip
        sum_kernel[(width // ROWS,)](partial, sums, parts, width, PARTS, ROWS)
        return projected, sums

    def teacher_rows(self) -> TeacherRows:
        """Read the teacher's rows once at the compared columns."""
        B, T, _ = self.z_t.shape
        width = self.teacher_padded
        rows, columns = TEACHER_TILE
        compared = torch.arange(self.K, device=self.device) if self.options.gathered else self.columns
        parts = triton.cdiv(self.K, columns)
        gathered = torch.empty((self.K, width), dtype=self.z_t.dtype, device=self.device)
        sums, lse = self._float(2, parts, width), self._float(width)
        kernels.p_kl_teacher_kernel[(parts, width // rows)](
            self.z_t, compared, gathered, *sums, B * T, T, self.K, self.z_t.stride(0), self.z_t.stride(1),
            width, self.scale, rows, columns, num_warps=8,
        )  # fmt: skip
        log_sum_exp_kernel[(width // ROWS,)](*sums, lse, parts, width, PARTS, ROWS)
        return TeacherRows(gathered, lse)

    def chunks(self, projected: Tensor, sums: Tensor, teacher: TeacherRows) -> ChunkResults:
        """Every chunk's divergence."""
        P = self.options.max_chunks
        shape, width = (self.C // P, P), padded(self.C)
        chunks, columns = CHUNK_TILE
        parts = triton.cdiv(self.K, self.per)
        norm, values = self._float(width), self._float(5, parts, width)
        places = torch.empty((2, parts, width), dtype=torch.int32, device=self.device)
        of_parts = (*values[:4], places[0], values[4], places[1])
        kernels.p_kl_chunk_kernel[(parts, width // chunks)](
            projected, sums, self.student.order, self.student.first,
            teacher.gathered, self.teacher.order, self.teacher.first, teacher.lse, norm, *of_parts,
            self.C, self.K, self.student_padded, self.teacher_padded, width, self.scale,
            self.options.reverse, self.prob, self.per, columns, chunks,
        )  # fmt: skip
        kl, mass, inner = (self._float(*shape) for _ in range(3))
        agrees = torch.empty(shape, dtype=torch.bool, device=self.device)
        kernels.p_kl_chunk_rows_kernel[(width // ROWS,)](
            *of_parts, kl, mass, inner, agrees, self.C, parts, width, PARTS, ROWS
        )
        return ChunkResults(kl, agrees, mass, norm, inner)

    def chunk_gradients(
        self, projected: Tensor, gathered: Tensor, teacher_lse: Tensor, norm: Tensor, inner: Tensor, upstream: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`[K, padded rows]` gradients by the projected entries, and each position's product of the two."""
        width = self.student_padded
        chunks, columns = CHUNK_BWD_TILE
        parts = triton.cdiv(self.K, columns)
        by_entry, partial, dots = self._float(self.K, width), self._float(parts, width), self._float(width)
        kernels.p_kl_chunk_bwd_kernel[(parts, triton.cdiv(self.C, chunks))](
            projected, self.student.order, self.student.first,
            gathered, self.teacher.order, self.teacher.first, teacher_lse,
            norm, inner, upstream, by_entry, partial, self.C, self.K, width, self.teacher_padded, self.scale,
            self.options.reverse, self.prob, columns, chunks, num_warps=8,
        )  # fmt: skip
        sum_kernel[(width // ROWS,)](partial, dots, parts, width, PARTS, ROWS)
        return by_entry, dots

    def student_gradient(
        self,
        logits: Tensor,
        slots: Sequence[Tensor],
        lse: Tensor,
        head_lse: Tensor,
        by_entry: Tensor,
        dots: Tensor,
        upstream: Tensor,
        targets: Tensor | None,
        of_losses: Tensor | None,
    ) -> Tensor:
        """`[B, T_s, V_head]` in the dtype of the logits; `of_losses` is the upstream of the cross-entropy."""
        B, T, V_head = logits.shape
        rows, columns = GRADIENT_TILE[0], min(GRADIENT_TILE[1], power_of_2(V_head))
        in_place = self.options.overwrite and logits.is_contiguous()
        out = logits if in_place else torch.empty((B, T, V_head), dtype=logits.dtype, device=self.device)
        head = V_head != self.V or self.scale != 1.0
        unused = lse
        kernels.p_kl_student_bwd_kernel[(triton.cdiv(V_head, columns), self.student_padded // rows)](
            logits, self.student.chunk, upstream, lse, dots, by_entry, *slots,
            unused if targets is None else targets, head_lse, unused if of_losses is None else of_losses, out,
            B * T, T, self.V, V_head, logits.stride(0), logits.stride(1), self.student_padded, self.scale,
            targets is not None, head, min(EAGER_SLOTS, slots[0].shape[0]), rows, columns,
        )  # fmt: skip
        return out
