"""The Triton functions of the divergence's forms; see `divergences`.

`FORM` is 0 where all text is given, else that of generated text: 1 is the reverse KL, what lies between them the
generalised JSD with this weight of the teacher. Which events are in generated text is read from the student's rows. In
every form the gradient for a token x of class c is `q_x (mass - ratio_c)`: `ratio_c` is the derivative by `-q_c`, and
`mass` the sum of `q_c ratio_c`.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG_TINY = tl.constexpr(-87.33654475055310)
TINY = tl.constexpr(1.1754943508222875e-38)
SUMS = tl.constexpr(-1.0)
"""`FORM` of a first pass, which adds up what the terms of generated text depend on."""


@triton.jit
def is_generated(generated_ptr, row, FORM: tl.constexpr):
    """Return whether a student's row is in generated text."""
    generated = False
    if FORM != 0.0:
        generated = tl.load(generated_ptr + row) != 0
    return generated


@triton.jit
def xlogx(p):
    """Return `p log p`, 0 for 0."""
    return tl.where(p > 0.0, p * tl.log(tl.where(p > 0.0, p, 1.0)), 0.0)


@triton.jit
def floored_log(q):
    """Return `log q`, that of the smallest normal number for smaller ones."""
    return tl.log(tl.maximum(q, TINY))


@triton.jit
def terms_of(p, q, generated, sums, FORM: tl.constexpr):
    """Return classes' terms of the value and of the gradient's mass, and their ratios.

    In a first pass (`SUMS`) those of generated text are `q log(q / p)`, `q` and `log(p / q)`; with `sums` of `p` and of
    the first two, a second pass returns the terms themselves.
    """
    log_q = floored_log(q)
    term = xlogx(p) - p * log_q
    # Below the floor log q is constant: such a class keeps its value and has no gradient.
    of_mass = tl.where(q >= TINY, p, 0.0)
    ratio = of_mass / tl.maximum(q, TINY)
    if FORM != 0.0:
        gap = floored_log(p) - log_q
        other_term, other_ratio = -q * gap, gap
        if FORM > 0.0:
            mass, reach, cost = sums
            there = (mass > 0.0) & (reach > 0.0)  # without a class that both can have there is nothing to compare
            mass, reach = tl.where(there, mass, 1.0), tl.where(there, reach, 1.0)
            if FORM == 1.0:
                other_term = other_term / reach
                other_ratio = (1.0 + cost / reach + gap) / reach
            else:
                p = p / mass
                log_m = floored_log(FORM * p + (1.0 - FORM) * q)
                other_term = FORM * p * (floored_log(p) - log_m) + (1.0 - FORM) * q * (log_q - log_m)
                other_ratio = (1.0 - FORM) * (log_m - floored_log((1.0 - FORM) * q))
            other_term, other_ratio = tl.where(there, other_term, 0.0), tl.where(there, other_ratio, 0.0)
        other_mass = q
        if FORM > 0.0:
            other_mass = q * other_ratio
        term, of_mass, ratio = (
            tl.where(generated, other_term, term),
            tl.where(generated, other_mass, of_mass),
            tl.where(generated, other_ratio, ratio),
        )
    return term, of_mass, ratio


@triton.jit
def ratio_of(gap, shift, slope, FORM: tl.constexpr):
    """Return the ratios of classes at a start in generated text from `log(p / q)`, -inf of one that is not compared."""
    if FORM == 1.0:
        ratio = tl.where(gap == float("-inf"), 0.0, (gap + shift) * slope)
    else:
        ratio = tl.log(1.0 + FORM / (1.0 - FORM) * odds_of(gap, shift)) * slope
    return ratio


@triton.jit
def odds_of(gap, shift):
    """Return `p / q`, within bounds that neither it nor its inverse leaves; `shift` is that by the mass of all `p`."""
    return tl.exp(tl.minimum(tl.maximum(gap + shift, -80.0), 80.0))


@triton.jit
def mixture_term(odds, FORM: tl.constexpr):
    """Return a class's term of the generalised JSD of a start over the student's mass, all but `-FORM log FORM`.

    Of a class that is not compared that is the term of the student's mass beyond `reach`.
    """
    # With M the mixture: beta p log(p / M) = beta p (-log beta - log(1 + (1 - beta) q / (beta p))); the p sum up to 1.
    of_teacher = FORM * odds * tl.log(1.0 + (1.0 - FORM) / FORM / odds)
    return -of_teacher - (1.0 - FORM) * tl.log(1.0 - FORM + FORM * odds)


@triton.jit
def value_of(total, mass, generated, reach, FORM: tl.constexpr):
    """Return the divergence from the sums of its terms, of `p` and of `q`."""
    # m KL(p / m || q) = sum p log p - sum p log q - m log m.
    value = total - xlogx(mass)
    if FORM != 0.0:
        if FORM == 1.0:
            other = total - 2.0 * floored_log(reach) + floored_log(mass)
        else:
            # Of the student's mass beyond `reach` the mixture has (1 - beta) q.
            other = total - (1.0 - FORM) * tl.log(reach * 0.0 + (1.0 - FORM)) * tl.maximum(1.0 - reach, 0.0)
        value = tl.where(generated, tl.where((mass > 0.0) & (reach > 0.0), other, 0.0), value)
    return value
