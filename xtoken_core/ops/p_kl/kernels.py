"""The Triton kernels of `p_kl`. Rows of logits are read where they are; everything else is `[.., K]` wide."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.row_kernels import row_log_sum_exp

EPS = tl.constexpr(1e-10)
LOG_EPS = tl.constexpr(-23.025850929940457)


@triton.jit
def p_kl_project_kernel(
    logits_ptr,
    chunk_ptr,
    columns_ptr,
    offsets_ptr,
    sources_ptr,
    weights_ptr,
    lse_ptr,
    projected_ptr,
    T,
    V,
    K,
    stride_b,
    stride_t,
    scale,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One student position: log-sum-exp, then `softmax W[:, K]` gathered while its row is in the cache."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(chunk_ptr + row) >= 0:
        base = logits_ptr + row // T * stride_b + row % T * stride_t
        lse = row_log_sum_exp(base, V, scale, BLOCK)
        tl.store(lse_ptr + row, lse)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            column = tl.load(columns_ptr + k, mask=k < K, other=0)
            first = tl.load(offsets_ptr + column, mask=k < K, other=0)
            count = tl.load(offsets_ptr + column + 1, mask=k < K, other=0) - first
            total = tl.zeros((BLOCK_K,), dtype=tl.float32)
            for entry in range(tl.max(count, axis=0)):
                there = entry < count
                source = tl.load(sources_ptr + first + entry, mask=there, other=0)
                weight = tl.load(weights_ptr + first + entry, mask=there, other=0.0)
                x = tl.load(base + source, mask=there, other=float("-inf")).to(tl.float32)
                total += weight * tl.exp(x * scale - lse)
            tl.store(projected_ptr + row * K + k, total, mask=k < K)


@triton.jit
def p_kl_teacher_lse_kernel(
    logits_ptr,
    chunk_ptr,
    columns_ptr,
    lse_ptr,
    T,
    K,
    stride_b,
    stride_t,
    scale,
    BLOCK_K: tl.constexpr,
):
    """One teacher position: log-sum-exp over the compared columns."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(chunk_ptr + row) >= 0:
        base = logits_ptr + row // T * stride_b + row % T * stride_t
        lanes = tl.arange(0, BLOCK_K)
        running = tl.full((BLOCK_K,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_K,), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            mask = start + lanes < K
            column = tl.load(columns_ptr + start + lanes, mask=mask, other=0)
            x = tl.load(base + column, mask=mask, other=float("-inf")).to(tl.float32) * scale
            highest = tl.maximum(running, x)
            pivot = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp(running - pivot) + tl.exp(x - pivot)
            running = highest
        top = tl.max(running, axis=0)
        pivot = tl.where(top == float("-inf"), 0.0, top)
        tl.store(lse_ptr + row, tl.log(tl.sum(total * tl.exp(running - pivot), axis=0)) + pivot)


@triton.jit
def chunk_of_students(projected_ptr, order_ptr, first, count, k, K, BLOCK_K: tl.constexpr):
    """The chunk's mean projected probabilities at columns `k`."""
    total = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for i in range(count):
        row = tl.load(order_ptr + first + i)
        total += tl.load(projected_ptr + row * K + k, mask=k < K, other=0.0)
    return total / (count.to(tl.float32) + EPS)


@triton.jit
def chunk_of_teachers(
    logits_ptr,
    order_ptr,
    lse_ptr,
    columns_ptr,
    first,
    count,
    k,
    Q,
    T,
    K,
    stride_b,
    stride_t,
    scale,
    PROB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The chunk's averaged log-probabilities at columns `k`; -inf outside."""
    column = tl.load(columns_ptr + k, mask=k < K, other=0)
    total = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for i in range(count):
        row = tl.load(order_ptr + first + i)
        base = logits_ptr + row // T * stride_b + row % T * stride_t
        x = tl.load(base + column, mask=k < K, other=float("-inf")).to(tl.float32) * scale - tl.load(lse_ptr + row)
        total += tl.exp(x) if PROB else x
    mean = total / (count.to(tl.float32) + EPS)
    log_p = tl.log(mean + EPS) if PROB else mean
    log_p = tl.where((Q == 0.0) & (log_p == float("-inf")), LOG_EPS, log_p)
    return tl.where(k < K, log_p, float("-inf"))


@triton.jit
def p_kl_chunk_kernel(
    projected_ptr,
    student_order_ptr,
    student_first_ptr,
    teacher_logits_ptr,
    teacher_order_ptr,
    teacher_first_ptr,
    teacher_lse_ptr,
    columns_ptr,
    upstream_ptr,
    kl_ptr,
    agrees_ptr,
    mass_ptr,
    gradient_ptr,
    T,
    K,
    stride_b,
    stride_t,
    scale,
    REVERSE: tl.constexpr,
    PROB: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One chunk: forward its divergence, backward the gradient of every projected entry of its positions."""
    chunk = tl.program_id(0).to(tl.int64)
    first_s = tl.load(student_first_ptr + chunk)
    count_s = tl.load(student_first_ptr + chunk + 1) - first_s
    first_t = tl.load(teacher_first_ptr + chunk)
    count_t = tl.load(teacher_first_ptr + chunk + 1) - first_t
    lanes = tl.arange(0, BLOCK_K)
    mass_q = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        mass_q += chunk_of_students(projected_ptr, student_order_ptr, first_s, count_s, start + lanes, K, BLOCK_K)
    norm = tl.sum(mass_q, axis=0) + EPS
    kl = tl.zeros((BLOCK_K,), dtype=tl.float32)
    mass = tl.zeros((BLOCK_K,), dtype=tl.float32)
    best_q = tl.full((BLOCK_K,), -1.0, dtype=tl.float32)
    best_l = tl.full((BLOCK_K,), float("-inf"), dtype=tl.float32)
    at_q = tl.zeros((BLOCK_K,), dtype=tl.int32)
    at_l = tl.zeros((BLOCK_K,), dtype=tl.int32)
    inner = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + lanes
        Q = chunk_of_students(projected_ptr, student_order_ptr, first_s, count_s, k, K, BLOCK_K)
        log_p = chunk_of_teachers(
            teacher_logits_ptr, teacher_order_ptr, teacher_lse_ptr, columns_ptr, first_t, count_t, k, Q,
            T, K, stride_b, stride_t, scale, PROB, BLOCK_K,
        )  # fmt: skip
        r = Q / norm + EPS
        p = tl.where(k < K, tl.exp(log_p), 0.0)
        safe = tl.where(log_p == float("-inf"), 0.0, log_p)
        if BACKWARD:
            d = tl.log(r) - log_p + 1.0 if REVERSE else -p / r
            inner += tl.where(k < K, d * (Q / norm), 0.0)
        else:
            term = r * (tl.log(r) - log_p) if REVERSE else tl.where(p > 0.0, p * (safe - tl.log(r)), 0.0)
            kl += tl.where(k < K, term, 0.0)
            mass += p
            raw = tl.where(k < K, Q, -1.0)
            at_q = tl.where(raw > best_q, k, at_q)
            best_q = tl.maximum(best_q, raw)
            at_l = tl.where(log_p > best_l, k, at_l)
            best_l = tl.maximum(best_l, log_p)
    if BACKWARD:
        dot = tl.sum(inner, axis=0)
        factor = tl.load(upstream_ptr + chunk) / norm / (count_s.to(tl.float32) + EPS)
        for start in range(0, K, BLOCK_K):
            k = start + lanes
            Q = chunk_of_students(projected_ptr, student_order_ptr, first_s, count_s, k, K, BLOCK_K)
            log_p = chunk_of_teachers(
                teacher_logits_ptr, teacher_order_ptr, teacher_lse_ptr, columns_ptr, first_t, count_t, k, Q,
                T, K, stride_b, stride_t, scale, PROB, BLOCK_K,
            )  # fmt: skip
            r = Q / norm + EPS
            d = tl.log(r) - log_p + 1.0 if REVERSE else -tl.exp(log_p) / r
            tl.store(gradient_ptr + chunk * K + k, factor * (d - dot), mask=k < K)
    else:
        tl.store(kl_ptr + chunk, tl.sum(kl, axis=0))
        tl.store(mass_ptr + chunk, tl.sum(mass, axis=0))
        q_id = tl.min(tl.where(best_q == tl.max(best_q, axis=0), at_q, K), axis=0)
        l_id = tl.min(tl.where(best_l == tl.max(best_l, axis=0), at_l, K), axis=0)
        tl.store(agrees_ptr + chunk, q_id == l_id)


@triton.jit
def p_kl_position_bwd_kernel(
    logits_ptr,
    chunk_ptr,
    upstream_ptr,
    lse_ptr,
    projected_ptr,
    gradient_ptr,
    place_ptr,
    offsets_ptr,
    targets_ptr,
    weights_ptr,
    out_ptr,
    T,
    V,
    K,
    stride_b,
    stride_t,
    scale,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One student position: back through the projection and the softmax, row written once."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.load(chunk_ptr + row).to(tl.int64)
    upstream = tl.load(upstream_ptr + tl.maximum(chunk, 0))
    if (chunk < 0) | (upstream == 0.0):
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + row * V + v, tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty), mask=v < V)
    else:
        base = logits_ptr + row // T * stride_b + row % T * stride_t
        lse = tl.load(lse_ptr + row)
        products = tl.zeros((BLOCK_K,), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            p = tl.load(projected_ptr + row * K + k, mask=k < K, other=0.0)
            products += p * tl.load(gradient_ptr + chunk * K + k, mask=k < K, other=0.0)
        dot = tl.sum(products, axis=0)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            first = tl.load(offsets_ptr + v, mask=v < V, other=0)
            count = tl.load(offsets_ptr + v + 1, mask=v < V, other=0) - first
            pull = tl.zeros((BLOCK,), dtype=tl.float32)
            for entry in range(tl.max(count, axis=0)):
                there = entry < count
                target = tl.load(targets_ptr + first + entry, mask=there, other=0)
                weight = tl.load(weights_ptr + first + entry, mask=there, other=0.0)
                place = tl.load(place_ptr + target, mask=there, other=-1)
                pull += weight * tl.load(gradient_ptr + chunk * K + place, mask=place >= 0, other=0.0)
            x = tl.load(base + v, mask=v < V, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x * scale - lse) * (pull - dot) * scale
            tl.store(out_ptr + row * V + v, gradient.to(out_ptr.dtype.element_ty), mask=v < V)
