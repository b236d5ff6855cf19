"""The default loss with a strong and with a weak teacher, as a table for the page: from `results/strong.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.real import methods, predictions
from experiments.real.summary import BASELINE, CHAIN, VALIDATION, Outcome, outcomes

RESULT = Path(__file__).parent / "results" / "strong.json"
ADAPTIVE, FADING = "chain_adaptive", "chain_fading"
OTHERS = (CHAIN, FADING, "p_kl_scaled", "alm1")
TEACHER_NAMES = {methods.QWEN15: "Qwen2.5-Coder-1.5B", methods.GEMMA3: "Gemma 3 270M"}
ENGLISH = "handbook-en.test"
NOT_RUN = "not run"


def section() -> dict[str, Any]:
    """Return the result file's content, with the table and the numbers of predictions that were judged and not met."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    verdicts = Counter(row.rsplit("|", 2)[1].strip() for row in predictions.compare(result))
    missed = verdicts["**not**"]
    return {**result, "table": table(result), "judged": missed + verdicts["as predicted"], "missed": missed}


def table(result: Mapping[str, Any]) -> str:
    """Return the default and the others against cross-entropy in Markdown, the texts with the strongest teacher first.

    Args:
        result: Content of the result file.
    """
    titles = " | ".join(methods.TITLES[name] for name in OTHERS)
    lines = [
        "| text | teacher, alone | before | cross-entropy | default: chain, adaptive | its gain | part of the way to "
        f"the teacher | steps to cross-entropy's best | {titles} | English: before, cross-entropy, default |",
        f"|---|---|---|---|---|---|---|---|{'---|' * len(OTHERS)}---|",
    ]
    found = {(each.condition, each.method): each for each in outcomes(result)}
    return "\n".join([*lines, *(_line(result, found, name) for name in result["conditions"])])


def _line(result: Mapping[str, Any], found: Mapping[tuple[str, str], Outcome], name: str) -> str:
    condition = result["conditions"][name]
    text = f"{condition['source']}.test"
    ce, default = found[name, BASELINE], found[name, ADAPTIVE]
    before = _curve(result, ce)[0]
    teacher = result["teachers"][name][f"{VALIDATION}_{text}"]
    behind, gain = ce.bits[text] - teacher, ce.bits[text] - default.bits[text]
    gains = [
        f"{ce.bits[text] - found[name, other].bits[text]:+.3f}" if (name, other) in found else NOT_RUN
        for other in OTHERS
    ]
    english = (before[f"{VALIDATION}_{ENGLISH}"], ce.bits[ENGLISH], default.bits[ENGLISH])
    cells = [
        f"{condition['source']}, {condition['size'] / 1e6:g} MB",
        f"{TEACHER_NAMES[condition['teacher']]}: {teacher:.3f}",
        f"{before[f'{VALIDATION}_{text}']:.3f}",
        f"{ce.bits[text]:.3f} at {ce.rate:g}",
        f"{default.bits[text]:.3f} at {default.rate:g}",
        f"**{gain:+.3f}**",
        f"{gain / behind:.0%}" if behind > 0 else "passes it",
        _steps(result, ce, default),
        *gains,
        ", ".join(f"{bits:.3f}" for bits in english),
    ]
    return f"| {' | '.join(cells)} |"


def _curve(result: Mapping[str, Any], outcome: Outcome) -> list[dict[str, float]]:
    """Return the evaluations of the run that an outcome is of."""
    of = ("condition", "method", "weight", "rate", "seed")
    return next(run["curve"] for run in result["runs"] if all(run[key] == getattr(outcome, key) for key in of))


def _steps(result: Mapping[str, Any], ce: Outcome, default: Outcome) -> str:
    """Return the steps after which the default is as good on validation as cross-entropy at its best, and its."""
    least = min(row[VALIDATION] for row in _curve(result, ce))
    reached = next((row["step"] for row in _curve(result, default) if row[VALIDATION] <= least), None)
    return f"{reached:g} of {ce.step}" if reached is not None else "not reached"
