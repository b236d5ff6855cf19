"""Kernels over rows of logits that differ in how they read: by pointers or TMA, pipelined or not, one row or many.

Every kernel goes through the rows `program, program + programs, ...`: with as many programs as rows each has one, with
fewer the programs are persistent. With TMA the logits of all rows are one matrix with 64 columns, 128 bytes in
bfloat16, so that a tile of a row is one transfer; rows must be a multiple of 64 logits long, and contiguous. What a
tile holds behind the end of its row belongs to the next one and counts as `-inf`.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import (
    ADJACENT,
    bits_of,
    columns_of,
    exp,
    in_64_bits,
    live_words,
    raised,
    sum_over_lanes,
)
from xtoken_core.ops.row_kernels import LOWEST, added_exp, lanes_log_sum_exp

WIDTH = tl.constexpr(64)
"""Columns of the matrix that TMA reads."""


@triton.jit
def source_of(logits_ptr, desc, rows, V, LOAD: tl.constexpr, N: tl.constexpr):
    """Return the source of tiles of N logits: the pointer, or a descriptor made here or on the host."""
    source = logits_ptr
    if LOAD == "host":
        source = desc
    if LOAD == "tma":
        source = tl.make_tensor_descriptor(
            logits_ptr, shape=[rows * (V // WIDTH), WIDTH], strides=[WIDTH, 1], block_shape=[N // WIDTH, WIDTH]
        )
    return source


@triton.jit
def tile_of(source, row, begin, V, LOAD: tl.constexpr, N: tl.constexpr):
    """Return N logits of a row in float32, and their columns."""
    x = begin + tl.arange(0, N)
    if LOAD == "pointer":
        z = tl.load(source + in_64_bits(row) * V + x, mask=x < V, other=float("-inf"))
    else:
        z = tl.reshape(source.load([(row * (V // WIDTH) + begin // WIDTH).to(tl.int32), 0]), (N,))
    return tl.where(x < V, z.to(tl.float32), float("-inf")), x


@triton.jit
def lanes_of(source, row, begin, V, LOAD: tl.constexpr, LANES: tl.constexpr):
    """Return a tile of a row as `[LANES, ADJACENT]` in float32, and its columns."""
    x = columns_of(begin, LANES)
    if LOAD == "pointer":
        z = tl.load(source + in_64_bits(row) * V + x, mask=x < V, other=float("-inf"))
    else:
        z = source.load([(row * (V // WIDTH) + begin // WIDTH).to(tl.int32), 0])
        z = tl.reshape(z, (LANES, ADJACENT))
    return tl.where(x < V, z.to(tl.float32), float("-inf")), x


@triton.jit
def statistics_kernel(
    logits_ptr, desc, targets_ptr, lse_ptr, target_logit_ptr, best_ptr, rows, V,
    LOAD: tl.constexpr, STAGES: tl.constexpr, SPECIALIZED: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Compute what `row_statistics_kernel` does for the forward of `cross_entropy`."""
    source = source_of(logits_ptr, desc, rows, V, LOAD, N)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        running = tl.full((N,), LOWEST, dtype=tl.float32)
        total = tl.zeros((N,), dtype=tl.float32)
        guess = tl.zeros((N,), dtype=tl.int32)
        for begin in tl.range(0, V, N, num_stages=STAGES, warp_specialize=SPECIALIZED):
            z, x = tile_of(source, row, begin, V, LOAD, N)
            guess = tl.where(z > running, x, guess)
            total, running = added_exp(total, running, z)
        lse, top = lanes_log_sum_exp(total, running)
        tl.store(lse_ptr + row, lse)
        tl.store(best_ptr + row, tl.min(tl.where(running == top, guess, V), axis=0).to(tl.int64))
        own = tl.load(logits_ptr + in_64_bits(row) * V + tl.load(targets_ptr + row))
        tl.store(target_logit_ptr + row, own.to(tl.float32))


@triton.jit
def live_kernel(
    logits_ptr, desc, teacher_ptr, targets_ptr, event_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, partner_ptr,
    t_lse_ptr, lse_ptr, losses_ptr, s_lse_ptr, value_ptr, mass_ptr, rows, V, V_t, W,
    LOAD: tl.constexpr, STAGES: tl.constexpr, SPECIALIZED: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Compute what `chain_student_kernel` does in its one reading of a row, at temperature 1."""
    source = source_of(logits_ptr, desc, rows, V, LOAD, LANES * ADJACENT)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        event = tl.load(event_ptr + row)
        compared, at = tl.where(event >= 0, V, 0), tl.maximum(event, 0).to(tl.int64)
        t_base = teacher_ptr + tl.load(teacher_row_ptr + at).to(tl.int64) * V_t
        t_lse = tl.load(t_lse_ptr + at, mask=event >= 0, other=0.0)
        top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((LANES,), dtype=tl.float32)
        alive = tl.zeros((LANES,), dtype=tl.float32)
        kl = tl.zeros((LANES,), dtype=tl.float32)
        mass = tl.zeros((LANES,), dtype=tl.float32)
        for begin in tl.range(0, V, LANES * ADJACENT, num_stages=STAGES, warp_specialize=SPECIALIZED):
            z, x = lanes_of(source, row, begin, V, LOAD, LANES)
            word = live_words(s_bits_ptr + at * W, begin, compared, LANES)
            live = bits_of(word, x, compared)
            both = bits_of(word & live_words(t_bits_ptr + at * W, begin, compared, LANES), x, compared)
            y = tl.load(partner_ptr + x, mask=x < compared, other=0)
            log_p = tl.where(both, tl.load(t_base + y, mask=both, other=0.0).to(tl.float32) - t_lse, float("-inf"))
            p = exp(log_p)
            top, pivot, shrink = raised(top, z)
            e = exp(z - pivot[:, None])
            total = total * shrink + tl.sum(e, axis=1)
            alive = alive * shrink + tl.sum(tl.where(live, e, 0.0), axis=1)
            kl += tl.sum(tl.where(p > 0.0, p * (log_p - z), 0.0), axis=1)
            mass += tl.sum(p, axis=1)
        highest, whole = sum_over_lanes(top, total)
        lse = tl.log(whole) + highest
        tl.store(lse_ptr + row, lse)
        own = tl.load(logits_ptr + in_64_bits(row) * V + tl.load(targets_ptr + row)).to(tl.float32)
        tl.store(losses_ptr + row, lse - own)
        if event >= 0:
            s_lse = tl.log(sum_over_lanes(top, alive)[1]) + highest
            tl.store(s_lse_ptr + event, s_lse)
            tl.store(value_ptr + event, tl.sum(kl, axis=0) + s_lse * tl.sum(mass, axis=0))
            tl.store(mass_ptr + event, tl.sum(mass, axis=0))


@triton.jit
def gradient_kernel(
    logits_ptr, desc, teacher_ptr, t_desc, lse_ptr, t_lse_ptr, upstream_ptr, grad_ptr, grad_desc, rows, V,
    LOAD: tl.constexpr, STAGES: tl.constexpr, SPECIALIZED: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Compute `(softmax(student) - softmax(teacher)) * upstream`: two rows are read, one is written."""
    N: tl.constexpr = LANES * ADJACENT
    source = source_of(logits_ptr, desc, rows, V, LOAD, N)
    of_teacher = source_of(teacher_ptr, t_desc, rows, V, LOAD, N)
    into = source_of(grad_ptr, grad_desc, rows, V, LOAD, N)
    blocks = tl.cdiv(V, N)
    for tile in tl.range(
        tl.program_id(0), rows * blocks, tl.num_programs(0), num_stages=STAGES, warp_specialize=SPECIALIZED
    ):
        row, begin = tile // blocks, tile % blocks * N
        z, x = lanes_of(source, row, begin, V, LOAD, LANES)
        t, _ = lanes_of(of_teacher, row, begin, V, LOAD, LANES)
        gradient = exp(z - tl.load(lse_ptr + row)) - exp(t - tl.load(t_lse_ptr + row))
        gradient = (gradient * tl.load(upstream_ptr + row)).to(grad_ptr.dtype.element_ty)
        if LOAD == "pointer" or begin + N > V:
            tl.store(grad_ptr + in_64_bits(row) * V + x, gradient, mask=x < V)
        else:
            into.store(
                [(row * (V // WIDTH) + begin // WIDTH).to(tl.int32), 0], tl.reshape(gradient, (N // WIDTH, WIDTH))
            )
