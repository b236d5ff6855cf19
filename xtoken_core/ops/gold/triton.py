"""The Triton backend of `gold`: rows are read where they are; only the uncommon tails are ever held in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.ops.chunks import ChunkPositions, chunk_positions
from xtoken_core.ops.gold import kernels, select_kernels, tail_kernels
from xtoken_core.ops.gold.reference import GoldOptions, GoldResult, TokenPartition, gold
from xtoken_core.ops.numerics import ComparesLogits
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2

BLOCK = 4096
COMMON_BLOCK = 1024
GRADIENT_BLOCK = 2048
"""Ids of a row that a program takes at once."""
GRADIENT_BLOCKS = 8
"""Repetitions of that per program of the backward."""
PICK_BLOCK, PICK_WARPS, SAMPLE, SAMPLE_WARPS = 1024, 8, 8192, 8
"""Ids at once, and those that are looked at to guess where a chunk's largest probabilities begin."""
SELECT_BLOCK, SELECT_WARPS = 2048, 8
SPARE = 2560
"""Places of a row beside those wanted when its largest entries are picked: a guess then hardly ever misses."""
TAIL_BINS, TAIL_BLOCK, TAIL_WARPS, TAIL_PROGRAMS = 4096, 256, 8, 792
"""Bins of probabilities that lists are counted in, entries at once, and programs, each with bins of its own."""
MOST_COUNTED = 65_535
"""Longest list that is compared by counts, which have 16 bits; longer ones are sorted."""
SLAB_BYTES = 1 << 29
"""Most memory for the tails of both sides; chunks are taken slab by slab."""


@dataclass(frozen=True)
class Side:
    """One model's logits, last dimension contiguous, and its positions by chunk."""

    logits: Tensor
    positions: ChunkPositions

    @property
    def strides(self) -> tuple[int, int]:
        """From sample to sample and from position to position."""
        return self.logits.stride(0), self.logits.stride(1)

    def log_sum_exp(self, scale: float) -> Tensor:
        """Compute the log-sum-exp of every position, `[B * T]`; positions without a chunk are left uninitialised."""
        B, T, V = self.logits.shape
        lse = torch.empty(B * T, dtype=torch.float32, device=self.logits.device)
        kernels.gold_lse_kernel[(B * T,)](
            self.logits, self.positions.chunk, lse, T, V, *self.strides, scale, min(BLOCK, power_of_2(V)), num_warps=8
        )
        return lse


class TritonGold(torch.autograd.Function):
    """Per-chunk gold with a gradient for the student's logits alone."""

    @staticmethod
    def forward(
        ctx: Any, student_logits: Tensor, student: Side, teacher: Side, partition: TokenPartition, options: GoldOptions
    ) -> tuple[Tensor, ...]:
        """Return (kl_common, l1_uncommon, agrees, mass), each `[B, P]`."""
        B, _, V = student_logits.shape
        shape, device = (B, options.max_chunks), student_logits.device
        kl, mass, kl_slope, l1, l1_slope = torch.empty((5, *shape), dtype=torch.float32, device=device)
        agrees = torch.empty(shape, dtype=torch.bool, device=device)
        signs = torch.zeros((B * options.max_chunks, V), dtype=torch.int8, device=device)
        scale = 1.0 / options.temperature
        lse = student.log_sum_exp(scale), teacher.log_sum_exp(scale)
        c = partition.common_student.shape[0]
        kernels.gold_common_kernel[(kl.numel(),)](
            student.logits, *student.positions[1:], lse[0], teacher.logits, *teacher.positions[1:], lse[1],
            partition.common_student.int(), partition.common_teacher.int(), kl, mass, kl_slope, agrees, c,
            student.logits.shape[1], teacher.logits.shape[1], *student.strides, *teacher.strides, scale,
            options.reverse, min(COMMON_BLOCK, power_of_2(c)), num_warps=8,
        )  # fmt: skip
        _compare_tails(student, teacher, lse, partition, options, (mass, l1, l1_slope, signs))
        ctx.positions, ctx.partition, ctx.options = (student.positions, teacher.positions), partition, options
        ctx.save_for_backward(student.logits, teacher.logits, *lse, kl_slope, l1_slope, signs)
        ctx.mark_non_differentiable(agrees, mass)
        return kl, l1, agrees, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor, grad_l1: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient in the dtype of the logits."""
        *logits, student_lse, teacher_lse, kl_slope, l1_slope, signs = ctx.saved_tensors
        student, teacher = (Side(z, positions) for z, positions in zip(logits, ctx.positions, strict=True))
        partition = ctx.partition
        B, T, V = student.logits.shape
        gradient = torch.empty((B, T, V), dtype=student.logits.dtype, device=student.logits.device)
        pair = torch.full((V,), -1, dtype=torch.int32, device=gradient.device)
        pair = pair.scatter(0, partition.common_student, partition.common_teacher.int())
        block = min(GRADIENT_BLOCK, power_of_2(V))
        per = GRADIENT_BLOCKS * block
        kernels.gold_bwd_kernel[(triton.cdiv(V, per) * B * T,)](
            student.logits, *student.positions, student_lse, teacher.logits, *teacher.positions[1:], teacher_lse,
            pair, signs, grad_kl.float().contiguous(), grad_l1.float().contiguous(), kl_slope, l1_slope, gradient,
            T, teacher.logits.shape[1], V, *student.strides, *teacher.strides, 1.0 / ctx.options.temperature,
            ctx.options.reverse, per, block, num_warps=8,
        )  # fmt: skip
        return gradient, None, None, None, None


@dataclass(frozen=True)
class Tail:
    """One side's uncommon ids, and how many of each chunk's probabilities at them are compared."""

    side: Side
    lse: Tensor
    ids: Tensor
    wanted: int

    @property
    def picked(self) -> bool:
        """Return True if the largest values are picked before they are compared."""
        return self.wanted + SPARE < self.ids.shape[0]

    @property
    def width(self) -> int:
        """Number of probabilities of a chunk that are compared."""
        return self.wanted + SPARE if self.picked else self.ids.shape[0]

    def descending(self, start: int, rows: int, scale: float, mass: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities of `rows` chunks, largest first, their indices in the lists of ids, and these lists.

        Equal ones stay in the order of their ids. What all of them sum up to is added to `mass`.
        """
        values, ids, _ = self.by_id(start, rows, scale, mass)
        return (*values.sort(dim=1, descending=True, stable=True), ids)

    def by_id(self, start: int, rows: int, scale: float, mass: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities of `rows` chunks in the order of ids, the ids, and how many each chunk has.

        -1 fills up what is picked. What all of them sum up to is added to `mass`. The number is negative for a chunk
        without positions.
        """
        device, u = self.lse.device, self.ids.shape[0]
        values = torch.empty((rows, self.width), dtype=torch.float32, device=device)
        positions, T = self.side.positions, self.side.logits.shape[1]
        summed = self.lse if mass is None else mass
        if self.picked:
            return values, *self._pick(values, start, scale, mass)
        ids = self.ids.int().unsqueeze(0)
        kernels.gold_rest_kernel[(rows,)](
            self.side.logits, *positions[1:], self.lse, ids, values, summed, start, u, T, *self.side.strides, scale,
            mass is not None, min(BLOCK, power_of_2(u)), num_warps=8,
        )  # fmt: skip
        first = positions.first[start : start + rows + 1]
        return values, ids, torch.where(first[1:] > first[:-1], u, -self.wanted).int()

    def _pick(self, values: Tensor, start: int, scale: float, mass: Tensor | None) -> tuple[Tensor, Tensor]:
        """Fill in the largest probabilities; return their ids and numbers."""
        rows, device = values.shape[0], values.device
        ids = torch.empty((rows, self.width), dtype=torch.int32, device=device)
        sizes = torch.empty(rows, dtype=torch.int32, device=device)
        edges = torch.empty(rows, dtype=torch.float32, device=device)
        u, T = self.ids.shape[0], self.side.logits.shape[1]
        inputs = self.side.logits, *self.side.positions[1:], self.lse, self.ids.int()
        shape = u, T, *self.side.strides, scale
        sample = min(SAMPLE, power_of_2(u))
        select_kernels.gold_edge_kernel[(rows,)](
            *inputs, edges, start, (self.wanted + self.width) // 2, *shape, triton.cdiv(u, sample), sample,
            num_warps=SAMPLE_WARPS,
        )  # fmt: skip
        select_kernels.gold_pick_kernel[(rows,)](
            *inputs, edges, values, ids, sizes, self.lse if mass is None else mass, start, self.wanted,
            self.width, *shape, mass is not None, PICK_BLOCK, num_warps=PICK_WARPS,
        )  # fmt: skip
        count_block = max(SELECT_BLOCK, power_of_2(triton.cdiv(u, 255)))  # a byte counts what a lane sees
        select_kernels.gold_select_kernel[(rows,)](
            *inputs, values, ids, sizes, start, self.wanted, self.width, *shape, count_block, SELECT_BLOCK,
            num_warps=SELECT_WARPS,
        )  # fmt: skip
        return ids, sizes


def _compare_tails(
    student: Side,
    teacher: Side,
    lse: tuple[Tensor, Tensor],
    partition: TokenPartition,
    options: GoldOptions,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill in the distance of the uncommon lists, its slopes and signs, and the rest of the teacher's mass."""
    mass, l1, l1_slope, signs = results
    u_s, u_t = partition.uncommon_student.shape[0], partition.uncommon_teacher.shape[0]
    cut = options.uncommon_topk
    n_s, n_t = (u_s, u_t) if cut is None else (min(u_s, u_t, cut),) * 2
    tails = (
        Tail(student, lse[0], partition.uncommon_student, n_s),
        Tail(teacher, lse[1], partition.uncommon_teacher, n_t),
    )
    slab = max(1, SLAB_BYTES // (4 * max(sum(tail.width for tail in tails), 1)))
    scale = 1.0 / options.temperature
    for start in range(0, l1.numel(), slab):
        rows = min(slab, l1.numel() - start)
        if cut is not None and max(tail.width for tail in tails) <= MOST_COUNTED:
            lists = tails[0].by_id(start, rows, scale, None), tails[1].by_id(start, rows, scale, mass)
            _compare_counts(tails, lists, n_s, start, (l1, l1_slope, signs))
            continue
        a, places, ids = tails[0].descending(start, rows, scale, None)
        b, *_ = tails[1].descending(start, rows, scale, mass)
        kernels.gold_l1_kernel[(rows,)](
            a, places, ids, b, l1, l1_slope, signs, start, n_s, n_t, max(n_s, n_t), signs.shape[1],
            a.stride(0), ids.stride(0) if tails[0].picked else 0, b.stride(0),
            min(BLOCK, power_of_2(max(n_s, n_t))), num_warps=8,
        )  # fmt: skip


def _compare_counts(
    tails: tuple[Tail, Tail],
    lists: tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    n: int,
    start: int,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill in the distance, the slopes and the signs of as many chunks as the lists have, from chunk `start` on."""
    l1, l1_slope, signs = results
    (a, ids, student_sizes), (b, _, teacher_sizes) = lists
    rows, device = a.shape[0], a.device
    programs, bins = min(rows, TAIL_PROGRAMS), min(TAIL_BINS, power_of_2(a.shape[1] + b.shape[1]))
    tables = torch.empty((programs, 3 * bins + 16), dtype=torch.int32, device=device)
    mixed = torch.empty((programs, 2 * bins), dtype=torch.int8, device=device)
    held = torch.empty((programs, a.shape[1] + b.shape[1]), dtype=torch.float32, device=device)
    held_at = torch.empty((*held.shape, 2), dtype=torch.int32, device=device)
    tail_kernels.gold_tail_kernel[(programs,)](
        a, student_sizes, ids, b, teacher_sizes, l1, l1_slope, signs, tables, mixed, held, held_at, start, rows, n,
        a.shape[1], b.shape[1], ids.stride(0) if tails[0].picked else 0, signs.shape[1], bins, min(TAIL_BLOCK, bins),
        num_warps=TAIL_WARPS,
    )  # fmt: skip


class TritonGoldOp(ComparesLogits):
    """Triton backend: float32 inside, deterministic, no float32 copy of either vocabulary."""

    def forward(
        self,
        student_logits: Float[Tensor, "B T_s V_s"],
        teacher_logits: Float[Tensor, "B T_t V_t"],
        partition: TokenPartition,
        student_chunk_id: Int[Tensor, "B T_s"],
        teacher_chunk_id: Int[Tensor, "B T_t"],
        options: GoldOptions,
    ) -> GoldResult:
        """Compute the same as the reference, which runs for float64 and batches without a chunk."""
        if not accumulates_in_float32(student_logits) or not student_logits.numel() * options.max_chunks:
            return gold(student_logits, teacher_logits, partition, student_chunk_id, teacher_chunk_id, options)
        student, teacher = (
            Side(z if z.stride(-1) == 1 else z.contiguous(), chunk_positions(ids, options.max_chunks))
            for z, ids in ((student_logits.detach(), student_chunk_id), (teacher_logits.detach(), teacher_chunk_id))
        )
        with launching_on(student_logits):
            return GoldResult(*TritonGold.apply(student_logits, student, teacher, partition, options))  # type: ignore[no-untyped-call]  # torch leaves it bare
