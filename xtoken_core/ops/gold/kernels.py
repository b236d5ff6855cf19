"""The Triton kernels of `gold`: one program per chunk forward, one per tile of a student row backward."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

EPS = tl.constexpr(1e-10)
LOG2_E = tl.constexpr(1.4426950408889634)
ADJACENT = tl.constexpr(8)
"""Columns of a lane: 16 bytes of bfloat16."""


@triton.jit
def columns_of(begin, LANES: tl.constexpr):
    """Return the columns of a tile, `[LANES, ADJACENT]`: a lane reads adjacent ones, and changes its pivot once."""
    return begin + tl.arange(0, LANES)[:, None] * ADJACENT + tl.arange(0, ADJACENT)[None, :]


@triton.jit
def finite(top):
    """Return a pivot for exponentials: 0 for -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def added_tile(top, total, pivot, z, rate):
    """Return lanes' sums of `2^(rate (z - pivot))` after one more tile; `top` is their pivot before it."""
    return total * tl.exp2((top - pivot) * rate) + tl.sum(tl.exp2((z - pivot[:, None]) * rate), axis=1)


@triton.jit
def over_lanes(top, total, rate):
    """Return `log sum exp` of lanes, each its largest logit and its sum, at the temperature `LOG2_E / rate`."""
    highest = finite(tl.max(top, axis=0))
    return tl.log(tl.sum(total * tl.exp2((top - highest) * rate), axis=0)) + highest * (rate / LOG2_E)


@triton.jit
def row_sums(base, first, V, top, total, whole, at, rate, BOTH: tl.constexpr, LANES: tl.constexpr):
    """Add the logits from `first` to `V` to lanes' largest logits, to their sums, and to where the largest are.

    Of the two sums `total` is at the rate of the temperature; `whole`, only if BOTH, at temperature 1.
    """
    for begin in range(first, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(z, axis=1))
        pivot = finite(new)
        at = tl.where(new > top, begin, at)
        total = added_tile(top, total, pivot, z, rate)
        # One pivot serves both temperatures: it is the largest logit, whatever the rate.
        if BOTH:
            whole = added_tile(top, whole, pivot, z, LOG2_E)
        top = new
    return top, total, whole, at


@triton.jit
def first_of_largest(base, V, top, at, LANES: tl.constexpr):
    """Return the lowest id of a row's largest logit: the tiles that hold it are read once more."""
    # `at` is where a lane's tile with its largest logit begins; only lanes that have the row's largest are read.
    largest = tl.max(top, axis=0)
    x = columns_of(0, LANES) + at[:, None]
    there = (top == largest)[:, None] & (x < V)
    z = tl.load(base + x, mask=there, other=0.0).to(tl.float32)
    return tl.min(tl.min(tl.where(there & (z == largest), x, 2147483647), axis=1), axis=0)


@triton.jit(do_not_specialize=["T"])
def gold_lse_kernel(logits_ptr, chunk_ptr, lse_ptr, T, V, stride_b, stride_t, scale, LANES: tl.constexpr):
    """Compute `log sum exp(scale * x)` of one row; rows of no chunk are not read."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(chunk_ptr + row) >= 0:
        base = logits_ptr + row // T * stride_b + row % T * stride_t
        rate = scale * LOG2_E
        top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((LANES,), dtype=tl.float32)
        at = tl.zeros((LANES,), dtype=tl.int32)
        top, total, _, _ = row_sums(base, 0, V, top, total, total, at, rate, False, LANES)
        tl.store(lse_ptr + row, over_lanes(top, total, rate))


@triton.jit(do_not_specialize=["T"])
def gold_student_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    head_lse_ptr,
    losses_ptr,
    hits_ptr,
    T,
    V,
    V_head,
    stride_b,
    stride_t,
    scale,
    UNSCALED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute one row's `log sum exp(scale * x)`, and the cross-entropy and first guess of its whole head."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row // T * stride_b + row % T * stride_t
    rate = scale * LOG2_E
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    whole = tl.zeros((LANES,), dtype=tl.float32)
    at = tl.zeros((LANES,), dtype=tl.int32)
    top, total, whole, at = row_sums(base, 0, V, top, total, whole, at, rate, not UNSCALED, LANES)
    tl.store(lse_ptr + row, over_lanes(top, total, rate))
    # At temperature 1 the sums of the vocabulary are the beginning of the head's.
    if UNSCALED:
        whole = total
    top, whole, _, at = row_sums(base, V, V_head, top, whole, total, at, LOG2_E, False, LANES)
    head_lse = over_lanes(top, whole, LOG2_E)
    target = tl.load(targets_ptr + row)
    tl.store(head_lse_ptr + row, head_lse)
    tl.store(losses_ptr + row, head_lse - tl.load(base + target).to(tl.float32))
    tl.store(hits_ptr + row, first_of_largest(base, V_head, top, at, LANES) == target)


@triton.jit
def side_of_chunk(chunk, tensors, sizes):
    """Return the operands of one chunk's means on one side.

    Returns:
        All logits, order and log-sum-exps, sizes and strides, then the chunk's first entry of the order, the number of
        its positions, and of the first one the logits and the log-sum-exp: read once, before any loop over ids. A
        chunk without positions has some valid row and 0.
    """
    logits_ptr, order_ptr, first_ptr, lse_ptr = tensors
    T, stride_b, stride_t = sizes
    first = tl.load(first_ptr + chunk)
    count = tl.load(first_ptr + chunk + 1) - first
    row, lse = tl.zeros((), dtype=tl.int64), tl.zeros((), dtype=tl.float32)
    if count > 0:
        row = tl.load(order_ptr + first)
        lse = tl.load(lse_ptr + row)
    base = logits_ptr + row // T * stride_b + row % T * stride_t
    return logits_ptr, order_ptr, lse_ptr, T, stride_b, stride_t, first, count, base, lse


@triton.jit
def mean_log_probs(side, ids, there, scale):
    """Compute one chunk's averaged log-probabilities at `ids`, `[BLOCK]`; `side` is from `side_of_chunk`."""
    logits_ptr, order_ptr, lse_ptr, T, stride_b, stride_t, first, count, base, lse = side
    log_p = tl.load(base + ids, mask=there, other=0.0).to(tl.float32) * scale - lse
    # A chunk without positions has log-probability 0, as the reference's mean over nothing.
    log_p = tl.where(count > 0, log_p, 0.0)
    if count > 1:
        # In the order of positions, so that the mean does not depend on what shares the batch.
        for i in range(1, count):
            row = tl.load(order_ptr + first + i)
            other = logits_ptr + row // T * stride_b + row % T * stride_t
            log_p += tl.load(other + ids, mask=there, other=0.0).to(tl.float32) * scale - tl.load(lse_ptr + row)
        log_p = log_p / (count.to(tl.float32) + EPS)
    return log_p


@triton.jit
def kl_term(log_p, log_q):
    """Compute `p (log p - log q)`, with `0 * -inf = 0`."""
    p = tl.exp(log_p)
    return tl.where(p > 0.0, p * (tl.where(p > 0.0, log_p, 0.0) - log_q), 0.0)


@triton.jit
def common_slope(S, L, REVERSE: tl.constexpr):
    """Compute the derivative of a common pair's term by the student's averaged log-probability."""
    return kl_term(S, L) + tl.exp(S) if REVERSE else -tl.exp(L)


@triton.jit(do_not_specialize=["T_s", "T_t", "c"])
def gold_common_kernel(
    student_ptr,
    student_order_ptr,
    student_first_ptr,
    student_lse_ptr,
    teacher_ptr,
    teacher_order_ptr,
    teacher_first_ptr,
    teacher_lse_ptr,
    common_student_ptr,
    common_teacher_ptr,
    kl_ptr,
    mass_ptr,
    slope_ptr,
    agrees_ptr,
    c,
    T_s,
    T_t,
    student_stride_b,
    student_stride_t,
    teacher_stride_b,
    teacher_stride_t,
    scale,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one chunk over the common pairs: divergence, the teacher's mass, the sum of the slopes, the best pairs."""
    chunk = tl.program_id(0).to(tl.int64)
    of_student = student_ptr, student_order_ptr, student_first_ptr, student_lse_ptr
    student = side_of_chunk(chunk, of_student, (T_s, student_stride_b, student_stride_t))
    of_teacher = teacher_ptr, teacher_order_ptr, teacher_first_ptr, teacher_lse_ptr
    teacher = side_of_chunk(chunk, of_teacher, (T_t, teacher_stride_b, teacher_stride_t))
    lanes = tl.arange(0, BLOCK)
    kl = tl.zeros((BLOCK,), dtype=tl.float32)
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    slope = tl.zeros((BLOCK,), dtype=tl.float32)
    best_s = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_t = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    at_s, at_t = lanes, lanes
    for start in range(0, c, BLOCK):
        pair = start + lanes
        there = pair < c
        of_s = tl.load(common_student_ptr + pair, mask=there, other=0)
        of_t = tl.load(common_teacher_ptr + pair, mask=there, other=0)
        S = mean_log_probs(student, of_s, there, scale)  # [BLOCK] pairs
        L = mean_log_probs(teacher, of_t, there, scale)
        kl += tl.where(there, kl_term(S, L) if REVERSE else kl_term(L, S), 0.0)
        mass += tl.where(there, tl.exp(L), 0.0)
        slope += tl.where(there, common_slope(S, L, REVERSE), 0.0)
        # `<`: of equal ones a lane keeps the first pair.
        at_s = tl.where(there & (best_s < S), pair, at_s)
        best_s = tl.where(there, tl.maximum(best_s, S), best_s)
        at_t = tl.where(there & (best_t < L), pair, at_t)
        best_t = tl.where(there, tl.maximum(best_t, L), best_t)
    tl.store(kl_ptr + chunk, tl.sum(kl, axis=0))
    tl.store(mass_ptr + chunk, tl.sum(mass, axis=0))
    tl.store(slope_ptr + chunk, tl.sum(slope, axis=0))
    s = tl.min(tl.where(best_s == tl.max(best_s, axis=0), at_s, 2147483647), axis=0)
    t = tl.min(tl.where(best_t == tl.max(best_t, axis=0), at_t, 2147483647), axis=0)
    tl.store(agrees_ptr + chunk, (s == t) & (c > 0))


@triton.jit(do_not_specialize=["T", "from_chunk"])
def gold_rest_kernel(
    logits_ptr,
    order_ptr,
    first_ptr,
    lse_ptr,
    ids_ptr,
    rest_ptr,
    mass_ptr,
    from_chunk,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one chunk's probabilities at the uncommon ids contiguously; their sum is added to its mass."""
    slot = tl.program_id(0).to(tl.int64)
    chunk = from_chunk + slot
    side = side_of_chunk(chunk, (logits_ptr, order_ptr, first_ptr, lse_ptr), (T, stride_b, stride_t))
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, u, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < u
        ids = tl.load(ids_ptr + place, mask=there, other=0)
        log_p = mean_log_probs(side, ids, there, scale)
        p = tl.where(there, tl.exp(log_p), 0.0)
        tl.store(rest_ptr + slot * u + place, p, mask=there)
        mass += p
    if MASS:
        tl.store(mass_ptr + chunk, tl.load(mass_ptr + chunk) + tl.sum(mass, axis=0))


@triton.jit(do_not_specialize=["from_chunk"])
def gold_l1_kernel(
    student_ptr,
    places_ptr,
    ids_ptr,
    teacher_ptr,
    l1_ptr,
    slope_ptr,
    signs_ptr,
    from_chunk,
    n_s,
    n_t,
    n,
    V,
    student_stride,
    ids_stride,
    teacher_stride,
    BLOCK: tl.constexpr,
):
    """Compute one chunk's L1 distance of two descending lists; store each difference's sign at the student's id.

    `places` are those in the list of ids; each is a row per chunk, but where all chunks share one list of ids.
    """
    slot = tl.program_id(0).to(tl.int64)
    chunk = from_chunk + slot
    l1 = tl.zeros((BLOCK,), dtype=tl.float32)
    slope = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        a = tl.load(student_ptr + slot * student_stride + i, mask=i < n_s, other=0.0)
        b = tl.load(teacher_ptr + slot * teacher_stride + i, mask=i < n_t, other=0.0)
        # Beyond the shorter list the other side counts as 0 (ULD); NaN gives a NaN distance and no sign.
        sign = (a > b).to(tl.float32) - (a < b).to(tl.float32)
        l1 += tl.abs(a - b)
        slope += sign * a
        place = tl.load(places_ptr + slot * student_stride + i, mask=i < n_s, other=0)
        v = tl.load(ids_ptr + slot * ids_stride + place, mask=i < n_s, other=0)
        tl.store(signs_ptr + chunk * V + v, sign.to(tl.int8), mask=i < n_s)
    tl.store(l1_ptr + chunk, tl.sum(l1, axis=0))
    tl.store(slope_ptr + chunk, tl.sum(slope, axis=0))


@triton.jit
def token_gradient(p, v, target, of_loss):
    """Compute `(softmax - onehot) * of_loss`, the cross-entropy's gradient."""
    return (p - (v == target).to(tl.float32)) * of_loss


@triton.jit
def token_gradient_of_row(
    base, to_ptr, from_v, to_v, V_head, head_lse, target, of_loss, COMPUTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the cross-entropy's gradient of a part of a row, or zeros."""
    for start in range(from_v, to_v, BLOCK):
        v = start + tl.arange(0, BLOCK)
        gradient = tl.zeros((BLOCK,), dtype=tl.float32)
        if COMPUTED:
            x = tl.load(base + v, mask=v < V_head, other=float("-inf")).to(tl.float32)
            gradient = token_gradient(tl.exp(x - head_lse), v, target, of_loss)
        tl.store(to_ptr + v, gradient.to(to_ptr.dtype.element_ty), mask=v < V_head)


@triton.jit
def chunk_gradient_of_row(
    row,
    chunk,
    upstream,
    student,
    teacher,
    tables,
    token,
    sizes,
    REVERSE: tl.constexpr,
    TARGETS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a part of a row's gradient.

    `upstream` is that of the chunk's divergence and of its distance, and the sum of the gradient of its means.
    """
    base, to_ptr, from_v, to_v, lse = row
    of_kl, of_l1, total = upstream
    pair_ptr, signs_ptr = tables
    head_lse, target, of_loss = token
    V, V_head, scale = sizes
    count_s = student[7]  # the chunk's number of student positions
    factor = scale / (count_s.to(tl.float32) + EPS)
    for start in range(from_v, to_v, BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < V
        pair = tl.load(pair_ptr + v, mask=inside, other=-1)
        sign = tl.load(signs_ptr + chunk * V + v, mask=inside, other=0).to(tl.float32)
        x = tl.load(base + v, mask=v < V_head, other=float("-inf")).to(tl.float32)
        S = x * scale - lse
        p = tl.exp(S)
        q = p
        if count_s > 1:
            S = mean_log_probs(student, v, inside, scale)
            q = tl.exp(S)
        L = mean_log_probs(teacher, pair, pair >= 0, scale)
        # g_v, the derivative by the chunk's mean log-probability of v: of common pairs, and of the sorted rest, where
        # d|a - b| / d log a = sign * a. Through mean and softmax: scale / count (g_v - p_v sum g); `total` is sum g.
        by_mean = of_kl * tl.where(pair >= 0, common_slope(S, L, REVERSE), 0.0)
        by_mean += of_l1 * tl.where(sign != 0.0, sign * q, 0.0)
        gradient = (by_mean - p * total) * factor
        # The head is wider than the vocabulary or at another temperature: cross-entropy has a softmax of its own.
        if HEAD:
            gradient = tl.where(inside, gradient, 0.0)
            p = tl.exp(x - head_lse)
        if TARGETS:
            gradient += tl.where(of_loss != 0.0, token_gradient(p, v, target, of_loss), 0.0)
        tl.store(to_ptr + v, gradient.to(to_ptr.dtype.element_ty), mask=v < V_head)


@triton.jit(do_not_specialize=["T_s", "T_t"])
def gold_bwd_kernel(
    student_ptr,
    chunk_ptr,
    student_order_ptr,
    student_first_ptr,
    student_lse_ptr,
    teacher_ptr,
    teacher_order_ptr,
    teacher_first_ptr,
    teacher_lse_ptr,
    pair_ptr,
    signs_ptr,
    kl_upstream_ptr,
    l1_upstream_ptr,
    kl_slope_ptr,
    l1_slope_ptr,
    targets_ptr,
    head_lse_ptr,
    loss_upstream_ptr,
    gradient_ptr,
    T_s,
    T_t,
    V,
    V_head,
    student_stride_b,
    student_stride_t,
    teacher_stride_b,
    teacher_stride_t,
    scale,
    REVERSE: tl.constexpr,
    TARGETS: tl.constexpr,
    HEAD: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `scale / n (g - softmax(x) sum g)` for PER ids of one position, `g` the gradient of its chunk's means.

    With targets the cross-entropy's gradient is added; HEAD says that its softmax is another one.
    """
    parts = tl.cdiv(V_head, PER)  # one axis: the others of a grid end at 65,535
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    from_v, to_v = part * PER, tl.minimum(part * PER + PER, V_head)
    chunk = tl.load(chunk_ptr + row)
    known = tl.maximum(chunk, 0)
    of_kl, of_l1 = tl.load(kl_upstream_ptr + known), tl.load(l1_upstream_ptr + known)
    base = student_ptr + row // T_s * student_stride_b + row % T_s * student_stride_t
    to_ptr = gradient_ptr + row * V_head
    if TARGETS:
        of_loss, head_lse = tl.load(loss_upstream_ptr + row), tl.load(head_lse_ptr + row)
        target = tl.load(targets_ptr + row)
    else:
        of_loss, head_lse, target = 0.0, 0.0, -1
    # Without upstream gradient of the chunk the teacher's row is not read, however infinite its terms are.
    if (chunk < 0) | ((of_kl == 0.0) & (of_l1 == 0.0)):
        if of_loss == 0.0:
            token_gradient_of_row(base, to_ptr, from_v, to_v, V_head, head_lse, target, of_loss, False, BLOCK)
        else:
            token_gradient_of_row(base, to_ptr, from_v, to_v, V_head, head_lse, target, of_loss, TARGETS, BLOCK)
    else:
        total = of_kl * tl.load(kl_slope_ptr + chunk) + of_l1 * tl.load(l1_slope_ptr + chunk)
        of_student = student_ptr, student_order_ptr, student_first_ptr, student_lse_ptr
        student = side_of_chunk(chunk, of_student, (T_s, student_stride_b, student_stride_t))
        of_teacher = teacher_ptr, teacher_order_ptr, teacher_first_ptr, teacher_lse_ptr
        teacher = side_of_chunk(chunk, of_teacher, (T_t, teacher_stride_b, teacher_stride_t))
        chunk_gradient_of_row(
            (base, to_ptr, from_v, to_v, tl.load(student_lse_ptr + row)),
            chunk,
            (of_kl, of_l1, total),
            student,
            teacher,
            (pair_ptr, signs_ptr),
            (head_lse, target, of_loss),
            (V, V_head, scale),
            REVERSE,
            TARGETS,
            HEAD,
            BLOCK,
        )
