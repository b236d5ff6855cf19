"""The Triton backends of `gold`: rows are read where they are; only the uncommon tails are ever held in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.ops.chunks import ChunkPositions
from xtoken_core.ops.gold import kernels, pick_kernels
from xtoken_core.ops.gold.reference import (
    GoldCrossEntropyResult,
    GoldOptions,
    GoldResult,
    TokenPartition,
    gold,
    gold_cross_entropy,
)
from xtoken_core.ops.numerics import Op
from xtoken_core.ops.position_launch import positions_by_chunk
from xtoken_core.ops.side_stream import join, second_stream
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2, row_strides

ROW_LANES, ROW_WARPS = 512, 8
"""Lanes over a row, of `kernels.ADJACENT` logits each."""
BLOCK = 4096
COMMON_BLOCK = 1024
GRADIENT_BLOCK = 2048
"""Ids of a row that a program takes at once."""
GRADIENT_BLOCKS = 8
"""Repetitions of that per program of the backward."""
PICK_BLOCK, PICK_WARPS, SAMPLE = 1024, 8, 8192
"""Entries at once, and those that are looked at to guess where a chunk's largest probabilities begin."""
SPARE = 1536
"""Places of a row beside those wanted when its largest entries are picked: a guess then hardly ever misses."""
SLAB_BYTES = 1 << 29
"""Most memory for the uncommon probabilities of both sides and for those picked; chunks are taken slab by slab."""


@dataclass(frozen=True)
class Side:
    """One model's logits, last dimension contiguous, and its positions by chunk."""

    logits: Tensor
    positions: ChunkPositions

    @property
    def strides(self) -> tuple[int, int]:
        """From sample to sample and from position to position."""
        return row_strides(self.logits)

    def log_sum_exp(self, scale: float) -> Tensor:
        """Compute the log-sum-exp of every position, `[B * T]`; positions without a chunk are left uninitialised."""
        B, T, V = self.logits.shape
        lse = torch.empty(B * T, dtype=torch.float32, device=self.logits.device)
        kernels.gold_lse_kernel[(B * T,)](
            self.logits, self.positions.chunk, lse, T, V, *self.strides, scale, _lanes(V), num_warps=ROW_WARPS
        )
        return lse

    def cut(self, vocab_size: int) -> Side:
        """Keep the first `vocab_size` logits of every position."""
        return Side(self.logits[..., :vocab_size], self.positions)


class TokenValues(NamedTuple):
    """Results of one reading of the student's whole head.

    Attributes:
        lse: `[B * T_s]` log-sum-exps of the vocabulary, at the temperature.
        head_lse: `[B * T_s]`, of the whole head at temperature 1.
        losses: `[B, T_s]` cross-entropy.
        hits: `[B, T_s]`, True where the first guess was right.
    """

    lse: Tensor
    head_lse: Tensor
    losses: Tensor
    hits: Tensor


def _lanes(width: int) -> int:
    return min(ROW_LANES, power_of_2(triton.cdiv(width, 8)))


def _token_values(side: Side, targets: Tensor, vocab_size: int, scale: float) -> TokenValues:
    B, T, V_head = side.logits.shape
    device = side.logits.device
    lse, head_lse, losses = (torch.empty((B, T), dtype=torch.float32, device=device) for _ in range(3))
    hits = torch.empty((B, T), dtype=torch.bool, device=device)
    results, sizes = (lse, head_lse, losses, hits), (T, vocab_size, V_head, *side.strides, scale)
    kernels.gold_student_kernel[(B * T,)](
        side.logits, targets, *results, *sizes, scale == 1.0, _lanes(V_head), num_warps=ROW_WARPS
    )
    return TokenValues(lse.view(-1), head_lse.view(-1), losses, hits)


class TritonGold(torch.autograd.Function):
    """Per-chunk gold, and with targets per-position cross-entropy; one gradient, for the student's logits alone."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        student: Side,
        teacher: Side,
        partition: TokenPartition,
        options: GoldOptions,
        targets: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return (kl_common, l1_uncommon, agrees, mass), each `[B, P]`, and with targets (losses, hits), `[B, T_s]`."""
        V = partition.student_vocab_size
        shape, device = (student_logits.shape[0], options.max_chunks), student_logits.device
        kl, mass, kl_slope, l1, l1_slope = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(5))
        agrees = torch.empty(shape, dtype=torch.bool, device=device)
        scale = 1.0 / options.temperature
        # The teacher's rows and the zeros beside the student's rows.
        with second_stream(device):
            teacher_lse = teacher.log_sum_exp(scale)
            signs = torch.zeros((kl.numel(), V), dtype=torch.int8, device=device)  # of each chunk and id
        cut = student.cut(V)
        tokens = None if targets is None else _token_values(student, targets, V, scale)
        lse = cut.log_sum_exp(scale) if tokens is None else tokens.lse, teacher_lse
        join(device)
        _compare_common(cut, teacher, lse, partition, options, (kl, mass, kl_slope, agrees))
        _compare_tails(cut, teacher, lse, partition, options, (mass, l1, l1_slope, signs))
        ctx.positions, ctx.partition, ctx.options = (student.positions, teacher.positions), partition, options
        head_lse = None if tokens is None else tokens.head_lse
        ctx.save_for_backward(student.logits, teacher.logits, *lse, kl_slope, l1_slope, signs, targets, head_lse)
        if tokens is None:
            ctx.mark_non_differentiable(agrees, mass)
            return kl, l1, agrees, mass
        ctx.mark_non_differentiable(agrees, mass, tokens.hits)
        return kl, l1, agrees, mass, tokens.losses, tokens.hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor, grad_l1: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient in the dtype of the logits."""
        *logits, student_lse, teacher_lse, kl_slope, l1_slope, signs, targets, head_lse = ctx.saved_tensors
        student, teacher = (Side(z, positions) for z, positions in zip(logits, ctx.positions, strict=True))
        partition, scale = ctx.partition, 1.0 / ctx.options.temperature
        B, T, V_head = student.logits.shape
        V = partition.student_vocab_size
        of_losses = None if targets is None or others[2] is None else others[2].float().contiguous()
        gradient = torch.empty((B, T, V_head), dtype=student.logits.dtype, device=student.logits.device)
        # By student id the teacher's id of a common pair: the backward goes through rows, not through pairs.
        pair = torch.full((V,), -1, dtype=torch.int32, device=gradient.device)
        pair = pair.scatter(0, partition.common_student, partition.common_teacher.int())
        block = min(GRADIENT_BLOCK, power_of_2(V_head))
        per = GRADIENT_BLOCKS * block
        # Without targets another tensor takes the place of those that are not read.
        of_tokens = (student_lse,) * 3 if of_losses is None else (targets, head_lse, of_losses)
        of_student = student.logits, *student.positions, student_lse
        of_teacher = teacher.logits, *teacher.positions[1:], teacher_lse
        upstream = grad_kl.float().contiguous(), grad_l1.float().contiguous()
        sizes = T, teacher.logits.shape[1], V, V_head, *student.strides, *teacher.strides, scale
        constants = ctx.options.reverse, of_losses is not None, V_head != V or scale != 1.0, per, block
        chunks = pair, signs, *upstream, kl_slope, l1_slope, *of_tokens
        kernels.gold_bwd_kernel[(triton.cdiv(V_head, per) * B * T,)](
            *of_student, *of_teacher, *chunks, gradient, *sizes, *constants, num_warps=8
        )
        return gradient, None, None, None, None, None


class Tail(NamedTuple):
    """One side's uncommon ids, and how many of each chunk's probabilities at them are compared."""

    side: Side
    lse: Tensor
    ids: Tensor
    wanted: int

    @property
    def room(self) -> int:
        """Number of probabilities of a chunk that are sorted."""
        return min(self.wanted + SPARE, self.ids.shape[0])

    def descending(self, start: int, rows: int, scale: float, mass: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities of `rows` chunks, largest first, their places in lists of ids, and these lists.

        At least the `wanted` first are the chunks' largest; equal ones stay in the order of their ids. What all
        probabilities sum up to is added to `mass`.
        """
        u, rest = self.ids.shape[0], torch.empty((rows, self.ids.shape[0]), dtype=torch.float32, device=self.lse.device)
        summed = self.lse if mass is None else mass
        inputs = self.side.logits, *self.side.positions[1:], self.lse, self.ids
        sizes = start, u, self.side.logits.shape[1], *self.side.strides, scale
        kernels.gold_rest_kernel[(rows,)](
            *inputs, rest, summed, *sizes, mass is not None, min(BLOCK, power_of_2(u)), num_warps=8
        )
        values, ids = self._picked(rest, start) if self.room < u else (rest, self.ids)
        del rest  # a sort takes as much again
        return (*values.sort(dim=1, descending=True, stable=True), ids)

    def _picked(self, rest: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the largest probabilities and their ids, in the order of ids; -1 fills up a row."""
        rows, u = rest.shape
        values = rest.new_empty((rows, self.room))
        ids = torch.empty((rows, self.room), dtype=torch.int32, device=rest.device)
        sample = min(SAMPLE, power_of_2(u))
        inputs, sizes = (rest, self.ids, self.side.positions.first), (start, self.wanted, self.room, u)
        pick_kernels.gold_pick_kernel[(rows,)](
            *inputs, values, ids, *sizes, triton.cdiv(u, sample), sample, PICK_BLOCK, num_warps=PICK_WARPS
        )
        return values, ids


def _compare_common(
    student: Side,
    teacher: Side,
    lse: tuple[Tensor, Tensor],
    partition: TokenPartition,
    options: GoldOptions,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill in the divergence over the common pairs, the teacher's mass there, the slopes' sums and the best pairs."""
    c = partition.common_student.shape[0]
    of_student = student.logits, *student.positions[1:], lse[0]
    of_teacher = teacher.logits, *teacher.positions[1:], lse[1]
    pairs = partition.common_student.int(), partition.common_teacher.int()
    sizes = c, student.logits.shape[1], teacher.logits.shape[1], *student.strides, *teacher.strides
    constants = 1.0 / options.temperature, options.reverse, min(COMMON_BLOCK, power_of_2(c))
    kernels.gold_common_kernel[(results[0].numel(),)](
        *of_student, *of_teacher, *pairs, *results, *sizes, *constants, num_warps=8
    )


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
    # Without a cut the shorter list counts as continued by zeros (ULD).
    n_s, n_t = (u_s, u_t) if cut is None else (min(u_s, u_t, cut),) * 2
    tails = (
        Tail(student, lse[0], partition.uncommon_student.int(), n_s),
        Tail(teacher, lse[1], partition.uncommon_teacher.int(), n_t),
    )
    # float32 probabilities of both lists, and value and id of what is sorted.
    row_bytes = sum(4 * tail.ids.shape[0] + 8 * tail.room for tail in tails)
    # Slabs of one size: a small last one would leave most of the GPU idle.
    slabs = triton.cdiv(l1.numel() * row_bytes, SLAB_BYTES)
    slab = triton.cdiv(l1.numel(), max(slabs, 1))
    scale, n = 1.0 / options.temperature, max(n_s, n_t)
    for start in range(0, l1.numel(), slab):
        rows = min(slab, l1.numel() - start)
        with second_stream(l1.device):
            a, places, ids = tails[0].descending(start, rows, scale, None)
        b, *_ = tails[1].descending(start, rows, scale, mass)
        join(l1.device)
        sizes = start, n_s, n_t, n, signs.shape[1]
        strides = a.stride(0), ids.stride(0) if ids.dim() > 1 else 0, b.stride(0)
        kernels.gold_l1_kernel[(rows,)](
            a, places, ids, b, l1, l1_slope, signs, *sizes, *strides, min(BLOCK, power_of_2(n)), num_warps=8
        )


def _compare(
    student_logits: Tensor,
    teacher_logits: Tensor,
    partition: TokenPartition,
    chunk_ids: tuple[Tensor, Tensor],
    targets: Tensor | None,
    options: GoldOptions,
) -> tuple[Tensor, ...]:
    with launching_on(student_logits):
        student, teacher = (
            Side(z if z.stride(-1) == 1 else z.contiguous(), positions_by_chunk(ids, options.max_chunks))
            for z, ids in zip((student_logits.detach(), teacher_logits.detach()), chunk_ids, strict=True)
        )
        result: tuple[Tensor, ...] = TritonGold.apply(student_logits, student, teacher, partition, options, targets)  # type: ignore[no-untyped-call]  # torch leaves it bare
    return result


def _beyond_the_kernels(student_logits: Tensor, options: GoldOptions) -> bool:
    """Return True if there is nothing to launch or the arithmetic is float64."""
    return not accumulates_in_float32(student_logits) or not student_logits.numel() * options.max_chunks


class TritonGoldOp(Op):
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
        chunk_ids = student_chunk_id, teacher_chunk_id
        if _beyond_the_kernels(student_logits, options):
            return gold(student_logits, teacher_logits, partition, *chunk_ids, options)
        return GoldResult(*_compare(student_logits, teacher_logits, partition, chunk_ids, None, options))


class TritonGoldCrossEntropyOp(Op):
    """Triton backend: the student's log-sum-exps and cross-entropy from one reading, both gradients in one writing."""

    def forward(
        self,
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Float[Tensor, "B T_t V_t"],
        partition: TokenPartition,
        student_chunk_id: Int[Tensor, "B T_s"],
        teacher_chunk_id: Int[Tensor, "B T_t"],
        targets: Int[Tensor, "B T_s"],
        options: GoldOptions,
    ) -> GoldCrossEntropyResult:
        """Compute the same as the reference, which runs for float64 and batches without a chunk."""
        chunk_ids = student_chunk_id, teacher_chunk_id
        if _beyond_the_kernels(student_logits, options):
            return gold_cross_entropy(student_logits, teacher_logits, partition, *chunk_ids, targets, options)
        targets = targets.long().contiguous()
        return GoldCrossEntropyResult(*_compare(student_logits, teacher_logits, partition, chunk_ids, targets, options))
