"""The outcome in one picture and a few tables, for the page and the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.real import methods, summary
from experiments.real.picture import bars

CONDITION = "de-500k"
"""The condition of which every method is shown."""
NOT_SHOWN = (summary.BASELINE, "chain_unconditioned", "chain_no_end", "chain_uncorrected", "chain_bare_space")
"""Zero by definition, and forms of chain within noise of it."""
OTHERS = (summary.CHAIN, "alm1", "p_kl", "uld", "bpm")
"""Beside the default in the table; of the published losses ULD was the best one with equal weights on the text that all
are tried on, and BPM is with the best of three."""
ON_EVERY_TEXT = {summary.DEFAULT: "fading", summary.CHAIN: "one weight"}
"""Shown for every text in the picture."""
NOISE = 0.01
"""Bits per byte: three standard deviations of a method over data seeds."""
SWEPT = ("chat-500k", "chat-500k-small-rates")
"""A text at the usual learning rate, and the same with a sweep of smaller ones."""
LEAST, MOST, STEP = -0.25, 0.20, 0.05
NOT_RUN = "not run"


def picture(result: Mapping[str, Any]) -> str:
    """Return the picture: every method on one text, and chain on every text, where it was swept at the rates that fit.

    Args:
        result: Content of the result file.
    """
    result = with_sweeps(result)
    rows = [*_by_method(result), *_by_text(result)]
    legend = "bits per byte below cross-entropy alone, held-out text"
    words = "; ".join(f"{name}: {value:+.3f}" for name, value, _ in rows)
    return bars("What a teacher with another tokenizer adds", f"{legend}. {words}.", legend, rows, (LEAST, MOST, STEP))


def with_sweeps(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result whose texts have the runs at other learning rates too, so that each method is at its best rate.

    Args:
        result: Content of the result file.
    """
    runs = [{**run, "condition": methods.SWEEPS.get(run["condition"], run["condition"])} for run in result["runs"]]
    missing = [cell for cell in result["not_run"] if cell["condition"] not in methods.SWEEPS]
    conditions = {name: each for name, each in result["conditions"].items() if name not in methods.SWEEPS}
    return {**result, "conditions": conditions, "runs": runs, "not_run": missing}


def table(result: Mapping[str, Any]) -> str:
    """Return the table of the default against cross-entropy in Markdown.

    The texts on which it gains least come first.

    Args:
        result: Content of the result file.
    """
    result = with_sweeps(result)
    head = ["text", "teacher alone", "cross-entropy", "chain, fading", "its gain"]
    lines = []
    for name in sorted(_compared(result), key=lambda name: _least_gain(result, name)):
        rows, condition = _rows(result, name), result["conditions"][name]
        teacher = _teacher(result, name)
        untrained = summary.BASELINE in summary.untrained(summary.outcomes(result), name)
        ce = f"{rows[summary.BASELINE].test:.3f}{' (before training)' if untrained else ''}"
        default = rows.get(summary.DEFAULT)
        reached = f"{default.test:.3f}" if default else NOT_RUN
        gains = [f"**{_gain(default)}**", *(_gain(rows.get(other)) for other in OTHERS)]
        lines.append([name_of(condition), f"{teacher:.3f}" if teacher else "", ce, reached, *gains])
    return summary.markdown_table([*head, *(methods.TITLES[name] for name in OTHERS)], lines)


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the default is worse than cross-entropy, or within noise of it, and where chain with one weight is.

    Args:
        result: Content of the result file.

    Returns:
        `behind`, `constant`: texts on which the default and chain with one weight are worse, with the loss and the
        student's and teacher's bits per byte where the student passes; `close`: texts on which the default's gain is
        within the noise; `validation`: texts on which it is worse on validation, with the loss; `forgotten`: what it
        forgets more than cross-entropy after a text; `swept`: rate, figures and gains of `SWEPT`.
    """
    result = with_sweeps(result)
    names = {name: name_of(result["conditions"][name]) for name in _compared(result)}
    rows = {name: _rows(result, name) for name in names}
    shipped = summary.as_shipped(summary.outcomes(result))
    bits = {(o.condition, o.method): o.bits["validation"] for o in shipped if o.seed == summary.FIRST_SEED}
    gains = {name: row.gain for name, of in rows.items() if (row := of.get(summary.DEFAULT)) and row.gain is not None}
    later = {name: bits[name, summary.DEFAULT] - bits[name, summary.BASELINE] for name in gains}
    usual, fitted = (_rows(result, name) for name in SWEPT)
    return {
        "noise": NOISE,
        "behind": _losses(result, summary.DEFAULT),
        "constant": _losses(result, summary.CHAIN),
        "close": [names[name] for name, gain in gains.items() if abs(gain) < NOISE],
        "validation": [(names[name], loss) for name, loss in later.items() if loss > NOISE],
        "forgotten": [(names[name], lost) for name in gains if (lost := _forgotten(rows[name]))],
        "swept": {
            "text": name_of(result["conditions"][SWEPT[0]]),
            "rate": result["conditions"][SWEPT[0]]["rates"][0],
            "ce": [each[summary.BASELINE].test for each in (usual, fitted)],
            "gains": [_gain(each[summary.DEFAULT]) for each in (usual, fitted)],
        },
    }


def _forgotten(rows: Mapping[str, summary.Row]) -> list[tuple[str, float]]:
    """Return the other texts that the default forgets more than cross-entropy does, each at its best learning rate."""
    ce, default = rows[summary.BASELINE].others, rows[summary.DEFAULT].others
    losses = ((text.removesuffix(".test"), default[text] - ce[text]) for text in sorted(default))
    return [(text, loss) for text, loss in losses if loss > NOISE]


def _losses(result: Mapping[str, Any], method: str) -> list[tuple[str, float, tuple[float, float] | None]]:
    """Return where a method is worse than cross-entropy by more than the noise of a data seed."""
    found = []
    for name in _compared(result):
        rows = _rows(result, name)
        gain = (rows[method].gain if method in rows else None) or 0.0
        if gain < -NOISE:
            teacher, ce = _teacher(result, name), rows[summary.BASELINE].test
            passed = (ce, teacher) if teacher is not None and ce < teacher else None
            found.append((name_of(result["conditions"][name]), -gain, passed))
    return found


def _teacher(result: Mapping[str, Any], condition: str) -> float | None:
    source = result["conditions"][condition]["source"]
    found: float | None = result["teachers"].get(condition, {}).get(f"{summary.VALIDATION}_{source}.test")
    return found


def _gain(row: summary.Row | None) -> str:
    return (summary.gain_cell(row) if row else "") or NOT_RUN


def _least_gain(result: Mapping[str, Any], condition: str) -> float:
    rows = _rows(result, condition)
    return min(rows[name].gain or 0.0 for name in ON_EVERY_TEXT if name in rows)


def name_of(condition: Mapping[str, Any]) -> str:
    """Return how a condition is called: its text and its size, and how it differs from the usual ones."""
    name = f"{condition['source']}, {condition['size'] / 1e6:g} MB"
    usual = (condition["student"], condition["teacher"]) == (methods.SMOLLM2, methods.GEMMA3)
    notes = ["" if usual else "exchanged", condition.get("note", "")]
    return ", ".join([name, *filter(None, notes)])


def _rows(result: Mapping[str, Any], condition: str) -> dict[str, summary.Row]:
    """Return the condition's rows by method: the default with its own weights, others with those of the first seed."""
    best = summary.chosen(summary.as_shipped(summary.outcomes(result)), summary.FIRST_SEED)
    return {
        row.method: row for row in summary.table(result, condition) if best.get((condition, row.method)) == row.weight
    }


def _compared(result: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, condition in result["conditions"].items()
        if not condition.get("tasks") and {summary.CHAIN, summary.BASELINE} <= _rows(result, name).keys()
    ]


def _by_method(result: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """Return title, gain and kind of bar of every method, the best first."""
    gains = {name: row.gain for name, row in _rows(result, CONDITION).items() if name not in NOT_SHOWN}
    ranked = sorted(((gain, name) for name, gain in gains.items() if gain is not None), reverse=True)
    return [(f"German: {methods.TITLES[name]}", gain, "a" if gain > 0 else "b") for gain, name in ranked]


def _by_text(result: Mapping[str, Any]) -> Sequence[tuple[str, float, str]]:
    """Return title, gain and kind of bar of each text; of one with a sweep of its own, at the rates that fit."""
    names = sorted(_compared(result), key=lambda name: -_least_gain(result, name))
    left_out = {CONDITION, SWEPT[0] if SWEPT[1] in names else ""}
    shown = {name: name_of({**result["conditions"][name], "note": ""}) for name in names if name not in left_out}
    return [
        (f"{title}, {text}", gain, "a" if gain > 0 else "b")
        for name, text in shown.items()
        for method, title in ON_EVERY_TEXT.items()
        if (row := _rows(result, name).get(method)) is not None and (gain := row.gain) is not None
    ]
