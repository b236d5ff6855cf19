"""The launches behind the Triton backends of `p_kl`: buffers, grids, and the sizes of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.ops.chunk_mean.kernels import chunk_mean_kernel
from xtoken_core.ops.chunks import ChunkPositions
from xtoken_core.ops.numerics import EPSILON
from xtoken_core.ops.p_kl import chunk_kernels, kernels
from xtoken_core.ops.p_kl.reference import PKLOptions
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.tile_kernels import sum_kernel
from xtoken_core.ops.triton_support import power_of_2, row_strides

PADDING = 64
"""Positions (or chunks) of a line; buffers hold whole lines, whatever the batch: layouts stay the same."""
SLAB = 2048
"""Positions whose student logits are copied at once; a multiple of PADDING."""
STUDENT_TILE = (16, 256)
TEACHER_TILE = (64, 128)
GRADIENT_TILE = (64, 32)
"""Positions and columns of a tile of logits."""
PROJECT_TILE = (64, 8)
PROJECT_AHEAD = 4
CHUNK_TILE = (64, 8)
"""Positions (chunks) and compared columns of a tile, and projection entries that are loaded at once."""
PER = 32, 256
"""Compared columns of one program of the two kernels that go through several tiles, for few columns and for many."""
MANY = 32_768
STUDENT_WARPS, TEACHER_WARPS = 4, 8
PROJECT_WARPS, CHUNK_WARPS, GRADIENT_WARPS = 2, 2, 4
GRADIENT_REGISTERS = 64
"""Most registers of a thread of the gradient, with which a processor has more programs at a time."""
PARTS, ROWS = 512, 8
"""Parts and rows that a program combines at once."""


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
    """Results of one reading of the student's rows. Vectors are padded, except `losses` and `hits`, `[B, T_s]`.

    Attributes:
        lse: log-sum-exps.
        head_lse: Those of the whole head at temperature 1.
        projected: `[lines, K, PADDING]` projected probabilities; `Comparison.chunks` replaces them by slopes.
        sums: Their sums over K.
        losses: Cross-entropy, with targets.
        hits: True where the first guess was right, with targets.
    """

    lse: Tensor
    head_lse: Tensor
    projected: Tensor
    sums: Tensor
    losses: Tensor | None
    hits: Tensor | None


class TeacherRows(NamedTuple):
    """Results of one reading of the teacher's rows.

    Attributes:
        gathered: `[lines, K, PADDING]` logits at the compared columns.
        lse: Their log-sum-exps, padded.
        unnamed: `[B, T_t]` mass on the compared tokens that no row of the projection names.
    """

    gathered: Tensor
    lse: Tensor
    unnamed: Tensor


@dataclass
class ChunkResults:
    """Results of the op per chunk, `[B, P]`, and values saved for the backward pass; `products` is per position."""

    kl: Tensor
    agrees: Tensor
    mass: Tensor
    unnamed: Tensor
    norm: Tensor
    inner: Tensor
    products: Tensor


def padded(n: int) -> int:
    """Return `n` rounded up to a multiple of PADDING."""
    return (n + PADDING - 1) // PADDING * PADDING


class Comparison:
    """One call's projection and alignment, and the launches over them; logits pass through and are not kept."""

    def __init__(
        self,
        projection: ProjectionMatrix,
        columns: Tensor,
        student: ChunkPositions,
        teacher: ChunkPositions,
        options: PKLOptions,
    ) -> None:
        """Store the op's arguments; `columns` is contiguous."""
        self.projection, self.columns = projection, columns
        self.student, self.teacher, self.options = student, teacher, options
        self.prob = options.teacher_average == "prob"
        self.scale = 1.0 / options.temperature
        self.device = columns.device
        self.K, self.V = columns.shape[0], projection.student_vocab_size
        self.student_padded, self.teacher_padded = (padded(side.chunk.shape[0]) for side in (student, teacher))
        self.C = student.first.shape[0] - 1
        self.per = min(PER[self.K > MANY], max(PROJECT_TILE[1], CHUNK_TILE[1], power_of_2(self.K)))

    def _float(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _lines(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((width // PADDING, self.K, PADDING), dtype=dtype, device=self.device)

    def slots(self) -> Slots:
        """Return the projection cut to the compared columns."""
        W = self.projection
        ids = torch.arange(self.K, dtype=torch.int32, device=self.device)
        # Where each teacher token lies among the compared columns; -1 = not compared.
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
        """Read every row once: log-sum-exps, projected probabilities, and with targets the cross-entropy."""
        B, T, V_head = logits.shape
        width = self.student_padded
        head = targets is not None and (V_head != self.V or self.scale != 1.0)
        lse, sums = self._float(width), self._float(width)
        rows = StudentRows(
            lse, self._float(width) if head else lse, self._lines(width, torch.float32), sums, None, None
        )
        if targets is not None:
            rows.losses = self._float(B, T)
            rows.hits = torch.empty((B, T), dtype=torch.bool, device=self.device)
        slab = min(SLAB, width)
        transposed = torch.empty(slab * self.V, dtype=logits.dtype, device=self.device)
        # Slab by slab: the copy of the logits is never larger than SLAB positions.
        for from_row in range(0, width, slab):
            here = min(slab, width - from_row)
            self._slab_of_rows(logits, counts, targets, rows, transposed, from_row, here, head)
            self._project(transposed, rows, from_row, here)
        return rows

    def _slab_of_rows(
        self,
        logits: Tensor,
        counts: Tensor,
        targets: Tensor | None,
        out: StudentRows,
        transposed: Tensor,
        from_row: int,
        width: int,
        head: bool,
    ) -> None:
        """Read `width` rows: their sums, a copy of the ids that project into K, and the values per position."""
        B, T, V_head = logits.shape
        rows, columns = STUDENT_TILE[0], min(STUDENT_TILE[1], power_of_2(V_head))
        parts = triton.cdiv(V_head, columns)
        sums = self._float(2, parts, width)
        # Where the head is the vocabulary at temperature 1, its sums are the same.
        of_head = torch.empty_like(sums) if head else sums
        strides, positions = (*row_strides(logits), width), (B * T, T, from_row)
        sizes = *positions, self.V, V_head, *strides, self.scale
        kernels.p_kl_student_kernel[(parts, width // rows)](
            logits, counts, transposed, *sums, *of_head, *sizes, head, rows, columns, PADDING, num_warps=STUDENT_WARPS
        )
        # Without targets another tensor takes the place of those that are not read.
        known = targets is not None and out.losses is not None
        values = *sums, *of_head
        results = out.lse, out.head_lse, out.losses if known else out.lse, out.hits if known else out.lse
        constants = *positions, V_head, parts, *strides, known, head, PARTS, ROWS, columns
        kernels.p_kl_student_rows_kernel[(width // ROWS,)](
            logits, targets if known else out.lse, *values, *results, *constants
        )

    def _project(self, transposed: Tensor, out: StudentRows, from_row: int, width: int) -> None:
        """Compute projected probabilities of `width` rows, and their sums over K."""
        W = self.projection
        rows, columns = PROJECT_TILE
        parts = triton.cdiv(self.K, self.per)
        partial = self._float(parts, width)
        inputs = transposed, out.lse, self.columns, W.offsets, W.sources, W.weights
        sizes = self.K, self.V, from_row, width, self.scale
        tiles = self.per, columns, rows, PROJECT_AHEAD, PADDING
        kernels.p_kl_project_kernel[(parts, width // rows)](
            *inputs, out.projected, partial, *sizes, *tiles, num_warps=PROJECT_WARPS
        )
        sum_kernel[(width // ROWS,)](partial, out.sums[from_row:], parts, width, PARTS, ROWS)

    def teacher_rows(self, logits: Tensor) -> TeacherRows:
        """Read the teacher's rows once at the compared columns; their last dimension is contiguous."""
        B, T, _ = logits.shape
        width = self.teacher_padded
        rows, columns = TEACHER_TILE
        # Gathered logits have the compared columns alone, in their order.
        compared = torch.arange(self.K, device=self.device) if self.options.gathered else self.columns
        parts = triton.cdiv(self.K, columns)
        gathered = self._lines(width, logits.dtype)
        sums, lse, unnamed = self._float(3, parts, width), self._float(width), self._float(B, T)
        inputs = logits, compared, self.columns, self.projection.offsets
        sizes = B * T, T, self.K, *row_strides(logits), width, self.scale
        kernels.p_kl_teacher_kernel[(parts, width // rows)](
            *inputs, gathered, *sums, *sizes, rows, columns, PADDING, num_warps=TEACHER_WARPS
        )
        kernels.p_kl_teacher_rows_kernel[(width // ROWS,)](*sums, lse, unnamed, B * T, parts, width, PARTS, ROWS)
        return TeacherRows(gathered, lse, unnamed)

    def chunks(self, student: StudentRows, teacher: TeacherRows) -> ChunkResults:
        """Compute every chunk's divergence; `student.projected` then holds the slopes of every position."""
        P = self.options.max_chunks
        shape, width = (self.C // P, P), padded(self.C)
        chunks, columns = CHUNK_TILE
        parts = triton.cdiv(self.K, self.per)
        # Per part of the columns: three sums and two maxima with their indices, combined in a fixed order below.
        norm, values = self._float(width), self._float(5, parts, width)
        places = torch.empty((2, parts, width), dtype=torch.int32, device=self.device)
        of_parts = (*values[:4], places[0], values[4], places[1])
        partial, products = self._float(parts, self.student_padded), self._float(self.student_padded)
        of_student = student.projected, student.sums, self.student.order, self.student.first
        of_teacher = teacher.gathered, self.teacher.order, self.teacher.first, teacher.lse
        sizes = self.C, self.K, self.student_padded, width, self.scale
        constants = self.options.reverse, self.prob, self.per, columns, chunks, PADDING
        chunk_kernels.p_kl_chunk_kernel[(parts, width // chunks)](
            *of_student, *of_teacher, partial, norm, *of_parts, *sizes, *constants, num_warps=CHUNK_WARPS
        )
        sum_kernel[(self.student_padded // ROWS,)](partial, products, parts, self.student_padded, PARTS, ROWS)
        kl, mass, inner, unnamed = (self._float(*shape) for _ in range(4))
        agrees = torch.empty(shape, dtype=torch.bool, device=self.device)
        chunk_kernels.p_kl_chunk_rows_kernel[(width // ROWS,)](
            *of_parts, kl, mass, inner, agrees, self.C, parts, width, PARTS, ROWS
        )
        positions, strides = (self.teacher.order, self.teacher.first), (0, 1)  # all samples as one, a column wide
        chunk_mean_kernel[(self.C, 1)](
            teacher.unnamed, *positions, unnamed, self._float(*shape), teacher.unnamed.numel(), 1, *strides, EPSILON, 1
        )
        return ChunkResults(kl, agrees, mass, unnamed, norm, inner, products)

    def student_gradient(
        self,
        logits: Tensor,
        slots: Sequence[Tensor],
        by_position: Sequence[Tensor],
        by_chunk: Sequence[Tensor],
        targets: Tensor | None,
        of_losses: Tensor | None,
    ) -> Tensor:
        """Compute the gradient `[B, T_s, V_head]` in the dtype of the logits; in their memory if `options.overwrite`.

        `by_position` is (lse, head_lse, sums, products, slopes), `by_chunk` (upstream, norm, inner); `of_losses` is the
        upstream of the cross-entropy.
        """
        B, T, V_head = logits.shape
        width = self.student_padded
        lse, head_lse, sums, products, slopes = by_position
        factor, inner, dot = (self._float(width) for _ in range(3))
        inputs = self.student.chunk, self.student.first, *by_chunk, sums, products
        kernels.p_kl_factors_kernel[(width // ROWS,)](*inputs, factor, inner, dot, B * T, self.scale, ROWS)
        rows, columns = GRADIENT_TILE[0], min(GRADIENT_TILE[1], power_of_2(V_head))
        # A program reads and writes the same tile, so the gradient may take the memory of the logits.
        in_place = self.options.overwrite and logits.is_contiguous()
        out = logits if in_place else torch.empty((B, T, V_head), dtype=logits.dtype, device=self.device)
        head = V_head != self.V or self.scale != 1.0
        of_tokens = lse if targets is None else targets, head_lse, lse if of_losses is None else of_losses
        sizes = B * T, T, self.V, V_head, self.K, *row_strides(logits), self.scale
        constants = targets is not None, head, rows, columns, PADDING
        arguments = lse, slopes, factor, inner, dot, *slots, len(slots[0]), *of_tokens, out, *sizes, *constants
        kernels.p_kl_student_bwd_kernel[(triton.cdiv(V_head, columns), width // rows)](
            logits, *arguments, num_warps=GRADIENT_WARPS, maxnreg=GRADIENT_REGISTERS
        )
        return out
