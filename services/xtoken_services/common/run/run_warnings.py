"""Warnings that a run's metrics call for: mass that no gradient reaches, a term without effect, a worse student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xtoken_services.common.run.baseline import why_no_baseline
from xtoken_services.common.run.metric_lines import BITS, TEACHER_BITS, finite, table, unreachable_warnings, with_error
from xtoken_services.common.run.status import RunStatus
from xtoken_services.common.run.verdict import Verdict, difference

LEAST_FRACTION = 0.05
PAST_BEST = "best"
MOST_LEFT_OUT = 0.1
"""Part of the samples that may be skipped, or cut, without a warning."""
MOST_GROWTH = 2.0
"""Times by which entropy and length of completions may grow over a run, or the overlap ratio shrink."""
LEAST_ENTROPY = 0.5
"""Nats a token up to which entropy may grow as it likes: students that know their answers by heart gained from .004 to
.28, and lost where it passed 2."""
LEAST_FINISHED = 0.1
"""Fraction of completions by which those that end by themselves may become fewer."""
LEAST_SAMPLES = 20
"""Samples of a run under way of which such a part is said."""
SIZES = ("text: ", "models: ", "memory of ", "disk: ", "time: ")
"""Beginnings of lines before a run's start that state sizes."""


def is_size(line: str) -> bool:
    """Return whether a line before a run's start states a size, and is no warning."""
    return line.startswith(SIZES)


def warnings_of(status: RunStatus) -> dict[str, str]:
    """Return the warnings of a run, one line each, by the metric that they are about."""
    counted = left_out_warnings(*_left_out(status))
    metrics = unreachable_warnings(status.metrics) | _without_effect(status)
    return counted | metrics | _runaway(status) | _worse(status) | _past_best(status) | _weak_teacher(status)


def left_out_warnings(counts: Mapping[str, Any], of: float) -> dict[str, str]:
    """Return warnings that many samples are skipped or cut.

    Args:
        counts: Numbers of `skipped` and `truncated` ones, and the `reason` of one that is skipped.
        of: Number of all of them.
    """
    skipped, cut = (finite(counts).get(name, 0) for name in ("skipped", "truncated"))
    lines = {}
    if skipped > MOST_LEFT_OUT * of:
        reason = counts.get("reason") or "the workers' logs say why"
        lines["skipped"] = f"{skipped:.0f} of {of:.0f} samples are skipped, for they cannot be used ({reason})"
    if cut > MOST_LEFT_OUT * of:
        lines["truncated"] = (
            f"{cut:.0f} of {of:.0f} samples are cut at a context, what follows there is not trained: raise "
            'student.context_length and teacher.context_length, or for plain text set data.long = "split"'
        )
    return lines


def _left_out(status: RunStatus) -> tuple[Mapping[str, Any], float]:
    """Return the skipped and cut samples, and how many there are: of the run, its steps so far, or the first look."""
    summary, last, sample = finite(status.summary), finite(status.last), status.sample or {}
    reason = {"reason": sample.get("reason", "")}
    if "skipped" in summary:
        return summary | reason, sum(summary.get(name, 0) for name in ("trained", "skipped", "dead"))
    done = (last.get("step", -1) + 1) * finite(table(status.spec, "train")).get("samples_per_step", 0)
    if done < LEAST_SAMPLES or "skipped_total" not in last:
        return sample, finite(sample).get("positions", 0)
    return {"skipped": last["skipped_total"], "truncated": last.get("truncated_total", 0)} | reason, done


def _without_effect(status: RunStatus) -> dict[str, str]:
    fraction, scale = status.metrics.get("kl_fraction"), status.metrics.get("kl_loss_scale")
    loss = table(status.spec, "loss")
    end = loss.get("kl_loss_weight_end")
    largest = max(loss.get("kl_loss_weight", 1.0), end if isinstance(end, (int, float)) else 0.0)
    is_lowered = end is not None and scale is not None
    if scale == 0 or (is_lowered and scale < largest / 2):
        return {}  # close to cross-entropy alone, as was asked for
    if fraction is None or fraction >= LEAST_FRACTION:
        return {}
    text = (
        f"the divergence from the teacher is {fraction:.1%} of the loss (kl_fraction), which is close to cross-entropy "
        "alone: raise loss.kl_loss_weight or lower loss.ce_loss_scale"
    )
    return {"kl_fraction": text}


def _runaway(status: RunStatus) -> dict[str, str]:
    """Return warnings that completions are no longer what they were at the start, and what to change."""
    first, last = (finite(table(status.completions, name)) for name in ("first", "last"))
    loss, lines = table(status.spec, "loss"), {}
    reverse = loss.get("mode") == "chain" and not loss.get("reverse_kl") and loss.get("beta") is None
    schedule = "train" if table(status.spec, "rollout").get("learning_rate") is None else "rollout"
    way = 'set loss.mode = "chain" with loss.reverse_kl = true or loss.beta, or '
    change = (way if reverse else "") + f"lower {schedule}.learning_rate"
    change += "" if status.keeps_best else ", and keep the best student by eval.keep_best = true"

    def grown(name: str, times: float = MOST_GROWTH) -> bool:
        return name in first and last.get(name, 0.0) > times * first[name]

    if grown("entropy") and last["entropy"] > LEAST_ENTROPY:
        lines["entropy"] = (
            f"the student writes more and more at random: its completions have {last['entropy']:.2f} nats a token, "
            f"{first['entropy']:.2f} at first (entropy): {change}"
        )
    if "finished" in first and last.get("finished", 1.0) < first["finished"] - LEAST_FINISHED:
        lines["finished"] = (
            f"{last['finished']:.0%} of the completions end by themselves, {first['finished']:.0%} did at first "
            f"(finished): if those that are cut are good, raise rollout.max_new_tokens; otherwise {change}"
        )
    if grown("completion_tokens"):
        lines["completion_tokens"] = (
            f"completions have grown to {last['completion_tokens']:.0f} tokens, from {first['completion_tokens']:.0f} "
            f"at first (completion_tokens): if they repeat themselves, lower rollout.max_new_tokens, or {change}"
        )
    if "overlap_ratio" in last and last["overlap_ratio"] * MOST_GROWTH < first.get("overlap_ratio", 0.0):
        lines["overlap_ratio"] = (
            f"{last['overlap_ratio']:.0%} of what student and teacher find likeliest on completions is common, "
            f"{first['overlap_ratio']:.0%} was at first (overlap_ratio): the teacher cannot correct such text: {change}"
        )
    return lines


def _weak_teacher(status: RunStatus) -> dict[str, str]:
    """Return a warning if the teacher was worse than the student before any step."""
    first, lead = finite(status.first_evaluation), status.teacher_lead
    if lead is None or lead.bits <= 0 or not lead.beyond_error:
        return {}
    text = (
        f"the teacher is worse than the student on held-out text, before any training: {first[TEACHER_BITS]:.4f} and "
        f"{with_error(first)} bits per byte: ask it as it answers well (teacher.chat_template), choose another, or "
        "train without one" + " (--baseline shows what it adds)" * (not why_no_baseline(status.spec))
    )
    return {TEACHER_BITS: text}


def _worse(status: RunStatus) -> dict[str, str]:
    if status.change is None or status.change.verdict is not Verdict.WORSE:
        return {}
    last, first = finite(status.exported), finite(status.first_evaluation)
    text = (
        f"held-out text is worse than at step 0: {with_error(last)} bits per byte after {last['step']} "
        f"steps, {first[BITS]:.4f} before"
    )
    return {BITS: text}


def _past_best(status: RunStatus) -> dict[str, str]:
    """Return a warning if a completed run exports weights that are worse than earlier ones were."""
    best, last = status.best_evaluation or {}, status.evaluation or {}
    change = difference(last, best)
    if status.keeps_best or status.summary is None or change is None or change.verdict is not Verdict.WORSE:
        return {}
    text = (
        f"the exported student is past its best step: {with_error(last)} bits per byte on held-out text after "
        f"{last['step']} steps, {best[BITS]:.4f} after {best['step']}; eval.keep_best = true exports that one, "
        "eval.patience ends a run"
    )
    return {PAST_BEST: text}
