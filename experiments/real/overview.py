"""The outcome in one picture and one table, for the page of evidence and the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.digits.pictures import LEFT, ROW, TOP, WIDE, head, tick_at
from experiments.real import methods, summary

CONDITION = "de-500k"
"""The condition of which every method is shown."""
NOT_SHOWN = (summary.BASELINE, "chain_unconditioned", "chain_no_end", "chain_uncorrected", "chain_bare_space")
"""Zero by definition, and forms of chain within noise of it."""
OTHERS = ("alm1", "p_kl", "uld")
"""Beside chain in the table; ULD is the best of the published losses on the text that all are tried on."""
NOISE = 0.01
"""Bits per byte: three standard deviations of a method over data seeds."""
LEAST, MOST, STEP = -0.25, 0.20, 0.05


def picture(result: Mapping[str, Any]) -> str:
    """Return the picture: every method on one text, and chain on every text.

    Args:
        result: Content of the result file.
    """
    rows = [*_by_method(result), *_by_text(result)]
    legend = "bits per byte below cross-entropy alone, held-out text; *: some learning rates only"
    words = "; ".join(f"{name}: {value:+.3f}" for name, value, _ in rows)
    lines = head("What a teacher with another tokenizer adds", f"{legend}. {words}.", len(rows), legend)
    bottom = TOP + ROW * len(rows)
    for number in range(round(LEAST / STEP), round(MOST / STEP) + 1):
        lines += tick_at(_at(number * STEP), bottom, f"{number * STEP:+.2f}" if number else "0")
    for number, (name, value, kind) in enumerate(rows):
        lines += _bar(TOP + ROW * number, name, value, kind)
    return "\n".join([*lines, "</svg>"]) + "\n"


def table(result: Mapping[str, Any]) -> str:
    """Return the table of chain against cross-entropy in Markdown, the texts on which it loses first.

    Args:
        result: Content of the result file.
    """
    titles = " | ".join(methods.METHODS[name].title for name in OTHERS)
    lines = [
        f"| text | teacher alone | cross-entropy | chain | chain's gain | {titles} |",
        f"|---|---|---|---|---|{'---|' * len(OTHERS)}",
    ]
    for name in sorted(_compared(result), key=lambda name: _rows(result, name)["chain"].gain or 0.0):
        rows, condition = _rows(result, name), result["conditions"][name]
        teacher = result["teachers"].get(name, {}).get(f"{summary.VALIDATION}_{condition['source']}.test")
        chain = rows["chain"]
        gain = f"{chain.gain:+.3f} ± {chain.gain_deviation:.3f}" if chain.seeds > 1 else f"{chain.gain:+.3f}"
        others = [f"{rows[other].gain:+.3f}" if other in rows else "not run" for other in OTHERS]
        untrained = summary.BASELINE in summary.untrained(summary.outcomes(result), name)
        ce = f"{rows['ce'].test:.3f}{' (before training)' if untrained else ''}"
        cells = [_text(condition), f"{teacher:.3f}" if teacher else "", ce, f"{chain.test:.3f}"]
        lines.append(f"| {' | '.join([*cells, f'**{gain}**', *others])} |")
    return "\n".join(lines)


def worse(result: Mapping[str, Any]) -> str:
    """Return in a sentence where chain is worse than cross-entropy by more than the noise of a data seed.

    Args:
        result: Content of the result file.
    """
    found = []
    for name in _compared(result):
        chain, ce = (_rows(result, name)[method] for method in ("chain", "ce"))
        gain = chain.gain or 0.0
        if gain < -NOISE:
            condition = result["conditions"][name]
            teacher = result["teachers"].get(name, {}).get(f"{summary.VALIDATION}_{condition['source']}.test")
            passed = teacher is not None and ce.test < teacher
            why = f", where cross-entropy alone passes the teacher ({ce.test:.3f} and {teacher:.3f})" if passed else ""
            found.append(f"{-gain:.3f} bits per byte on {_text(condition)}{why}")
    if not found:
        return "On no measured text is the default worse than cross-entropy."
    return f"**The default loss, chain, is worse than cross-entropy** by {' and by '.join(found)}."


def _text(condition: Mapping[str, Any]) -> str:
    name = f"{condition['source']}, {condition['size'] / 1e6:g} MB"
    usual = (condition["student"], condition["teacher"]) == (methods.SMOLLM2, methods.GEMMA3)
    notes = ["" if usual else "exchanged", condition.get("note", "")]
    return ", ".join([name, *filter(None, notes)])


def _rows(result: Mapping[str, Any], condition: str) -> dict[str, summary.Row]:
    """Return the condition's rows by method, each with the weights chosen on the first data seed."""
    best = summary.chosen(summary.outcomes(result), summary.FIRST_SEED)
    return {
        row.method: row for row in summary.table(result, condition) if best.get((condition, row.method)) == row.weight
    }


def _compared(result: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, condition in result["conditions"].items()
        if not condition.get("tasks") and {"chain", "ce"} <= _rows(result, name).keys()
    ]


def _by_method(result: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """Return title, gain and kind of bar of every method, the best first; those of fewer learning rates are marked."""
    gains = {row.method: (row.gain, "") for row in _rows(result, CONDITION).values()}
    for partial in sorted(summary.partial_sweeps(result, CONDITION), key=lambda sweep: -len(sweep.rates)):
        gains.setdefault(partial.method, (partial.below[summary.BASELINE], " *"))
    known = [
        (methods.METHODS[name].title, gain, mark)
        for name, (gain, mark) in gains.items()
        if gain is not None and name not in NOT_SHOWN
    ]
    ranked = sorted(known, key=lambda row: -row[1])
    return [(f"German: {title}{mark}", gain, "a" if gain > 0 else "b") for title, gain, mark in ranked]


def _by_text(result: Mapping[str, Any]) -> Sequence[tuple[str, float, str]]:
    gains = [(name, _rows(result, name)["chain"].gain or 0.0) for name in _compared(result) if name != CONDITION]
    ranked = sorted(gains, key=lambda row: -row[1])
    texts = [(_text(result["conditions"][name]), gain) for name, gain in ranked]
    return [(f"chain, {text}", gain, "a" if gain > 0 else "b") for text, gain in texts]


def _at(value: float) -> float:
    return LEFT + WIDE * (min(max(value, LEAST), MOST) - LEAST) / (MOST - LEAST)


def _bar(y: int, name: str, value: float, kind: str) -> list[str]:
    left, right = sorted((_at(0.0), _at(value)))
    return [
        f'  <text class="text" x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{name}</text>',
        f'  <rect class="{kind}" x="{left:.1f}" y="{y + 5}" width="{right - left:.1f}" height="16"/>',
        f'  <text class="text" x="{right + 6:.1f}" y="{y + 18}">{value:+.3f}</text>',
    ]
