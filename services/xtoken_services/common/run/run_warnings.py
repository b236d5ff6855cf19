"""Warnings that a run's metrics call for: mass that no gradient reaches, a term without effect, a worse student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xtoken_services.common.run.best_evaluation import BITS, exported_evaluation, is_finite, keeps_best
from xtoken_services.common.run.verdict import Verdict, judge

MOST_UNREACHABLE = 0.1
LEAST_FRACTION = 0.05
UNREACHABLE = "unreachable_mass"
PAST_BEST = "best"


def warnings_of(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the warnings of a run, one line each, by the metric that they are about.

    Args:
        status: The fields of `GET /v1/runs/{id}`.
    """
    last = status.get("last") or {}
    return unreachable_warnings(last) | _without_effect(status) | _worse(status) | _past_best(status)


def change_since_start(status: Mapping[str, Any]) -> float | None:
    """Return the change of the held-out text's bits per byte since step 0; None before a second evaluation.

    With `eval.keep_best` it is that of the best evaluation, whose weights are exported.
    """
    first, last = status.get("first_evaluation") or {}, exported_evaluation(status)
    before, after = first.get(BITS), last.get(BITS)
    if first.get("step") != 0 or last.get("step") in (0, None):
        return None
    return after - before if is_finite(before) and is_finite(after) else None


def unreachable_warnings(last: Mapping[str, Any]) -> dict[str, str]:
    """Return a warning for every teacher of which too much mass has no gradient, from a step's metrics."""
    masses = {name: value for name, value in last.items() if name.startswith(UNREACHABLE) and is_finite(value)}
    lines = {}
    for name, mass in masses.items():
        if mass > MOST_UNREACHABLE:
            teacher = f"teacher {name.rpartition('_t')[2]}" if len(masses) > 1 else "the teacher"
            lines[name] = (
                f"{mass:.0%} of the probability of {teacher} is on tokens that no row of the projection names "
                f'({name}): P-KL has no gradient for them; use loss.mode = "chain", "alm" or "gold"'
            )
    return lines


def _without_effect(status: Mapping[str, Any]) -> dict[str, str]:
    last = status.get("last") or {}
    fraction = last.get("kl_fraction")
    loss, scale = (status.get("spec") or {}).get("loss") or {}, last.get("kl_loss_scale")
    is_lowered = loss.get("kl_loss_weight_end") is not None and is_finite(scale)
    if scale == 0 or (is_lowered and scale < max(loss.get("kl_loss_weight", 1.0), loss["kl_loss_weight_end"]) / 2):
        return {}  # close to cross-entropy alone, as was asked for
    if not is_finite(fraction) or fraction >= LEAST_FRACTION:
        return {}
    text = (
        f"the divergence from the teacher is {fraction:.1%} of the loss (kl_fraction), which is close to cross-entropy "
        "alone: raise loss.kl_loss_weight or lower loss.ce_loss_scale"
    )
    return {"kl_fraction": text}


def _worse(status: Mapping[str, Any]) -> dict[str, str]:
    change = change_since_start(status)
    if change is None or judge(change) is not Verdict.WORSE:
        return {}
    last, first = exported_evaluation(status), status["first_evaluation"]
    text = (
        f"held-out text is worse than at step 0: {last[BITS]:.4f} bits per byte after {last['step']} steps, "
        f"{first[BITS]:.4f} before"
    )
    return {BITS: text}


def _past_best(status: Mapping[str, Any]) -> dict[str, str]:
    """Return a warning if a completed run exports weights that are worse than earlier ones were."""
    best, last = (status.get("summary") or {}).get("best") or {}, status.get("evaluation") or {}
    before, after = best.get(BITS), last.get(BITS)
    if keeps_best(status) or not (is_finite(before) and is_finite(after)):
        return {}
    if judge(after - before) is not Verdict.WORSE:
        return {}
    text = (
        f"the exported student is past its best step: {after:.4f} bits per byte on held-out text after {last['step']} "
        f"steps, {before:.4f} after {best['step']}; eval.keep_best = true exports that one, eval.patience ends a run"
    )
    return {PAST_BEST: text}
