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
OLD_WINDOWS = (
    "When these figures were measured, evaluations put BOS only before the first of several windows of a document. "
    "**Gemma's own figure on python-code is therefore too high.** The others stand: SmolLM2's tokenizer adds no BOS, "
    "and documents of the other texts fit one window of Gemma, but for a few tokens."
)
"""Note below the table."""


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
    """Return the table of the default against cross-entropy in Markdown, with a note on the teacher's own figures.

    The texts on which it gains least come first.

    Args:
        result: Content of the result file.
    """
    result = with_sweeps(result)
    titles = " | ".join(methods.TITLES[name] for name in OTHERS)
    lines = [
        f"| text | teacher alone | cross-entropy | chain, fading | its gain | {titles} |",
        f"|---|---|---|---|---|{'---|' * len(OTHERS)}",
    ]
    for name in sorted(_compared(result), key=lambda name: _least_gain(result, name)):
        rows, condition = _rows(result, name), result["conditions"][name]
        teacher = _teacher(result, name)
        untrained = summary.BASELINE in summary.untrained(summary.outcomes(result), name)
        ce = f"{rows[summary.BASELINE].test:.3f}{' (before training)' if untrained else ''}"
        default = rows.get(summary.DEFAULT)
        reached = f"{default.test:.3f}" if default else NOT_RUN
        gains = [f"**{_gain(default)}**", *(_gain(rows.get(other)) for other in OTHERS)]
        cells = [name_of(condition), f"{teacher:.3f}" if teacher else "", ce, reached, *gains]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", OLD_WINDOWS])


def worse(result: Mapping[str, Any]) -> str:
    """Return in sentences where the default is worse than cross-entropy, and where chain with one weight is.

    Args:
        result: Content of the result file.
    """
    result = with_sweeps(result)
    default, constant = (_losses(result, method) for method in (summary.DEFAULT, summary.CHAIN))
    if default:
        lines = [f"**Chain that fades is worse than cross-entropy** by {' and by '.join(default)}."]
    else:
        lines = [
            "On every one of these texts chain that fades was at least as good on the test split as "
            f"cross-entropy.{_within_noise(result)}{_on_validation(result)}"
        ]
    lines += _forgotten(result)
    unknown = [name for name in _compared(result) if summary.DEFAULT not in _rows(result, name)]
    if unknown:
        lines.append(f"It has not run on {'; '.join(name_of(result['conditions'][name]) for name in unknown)}.")
    if constant:
        lines.append(f"**With one weight to the end chain is worse than cross-entropy** by {'; by '.join(constant)}.")
    return "\n".join(lines)


def fitted_rates(result: Mapping[str, Any]) -> str:
    """Return in sentences what a sweep of the learning rate leaves of the default's gain; empty where it has not run.

    Args:
        result: Content of the result file.
    """
    usual, fitted = (_rows(result, name) for name in SWEPT)
    if not all({summary.BASELINE, summary.DEFAULT} <= rows.keys() for rows in (usual, fitted)):
        return ""
    ce = [rows[summary.BASELINE].test for rows in (usual, fitted)]
    gains = [_gain(rows[summary.DEFAULT]) for rows in (usual, fitted)]
    text = name_of(result["conditions"][SWEPT[0]])
    rate = result["conditions"][SWEPT[0]]["rates"][0]
    return (
        f"**On {text}, most of the gain came from a poor learning rate.** At {rate:g} cross-entropy reaches "
        f"{ce[0]:.3f}, at smaller rates {ce[1]:.3f}, and the gain of chain that fades shrinks from {gains[0]} to "
        f"{gains[1]}. On handbook-de, 0.5 MB, where all losses have a sweep, {rate:g} is cross-entropy's best."
    )


def _within_noise(result: Mapping[str, Any]) -> str:
    """Return in a sentence where the default's gain is less than the noise of a data seed; empty if nowhere."""
    gains = {name: _rows(result, name).get(summary.DEFAULT) for name in _compared(result)}
    small = [name for name, row in gains.items() if row and row.gain is not None and abs(row.gain) < NOISE]
    texts = "; ".join(name_of(result["conditions"][name]) for name in small)
    return f" Its gain is within the noise of {NOISE:g} bits per byte on {texts}." if small else ""


def _on_validation(result: Mapping[str, Any]) -> str:
    """Return in a sentence where the default is worse on validation by more than the noise; empty if nowhere."""
    found = summary.as_shipped(summary.outcomes(result))
    bits = {(o.condition, o.method): o.bits["validation"] for o in found if o.seed == summary.FIRST_SEED}
    behind = []
    for name in _compared(result):
        if (name, summary.DEFAULT) in bits:
            loss = bits[name, summary.DEFAULT] - bits[name, summary.BASELINE]
            if loss > NOISE:
                behind.append(f"{loss:.3f} on {name_of(result['conditions'][name])}")
    return f" **On validation it is worse** by {'; by '.join(behind)}." if behind else ""


def _forgotten(result: Mapping[str, Any]) -> list[str]:
    """Return in a sentence what the default forgets more than cross-entropy does, each at its best learning rate."""
    found = []
    for name in _compared(result):
        rows = _rows(result, name)
        if summary.DEFAULT in rows:
            ce, default = rows[summary.BASELINE].others, rows[summary.DEFAULT].others
            losses = {text.removesuffix(".test"): default[text] - ce[text] for text in sorted(default)}
            lines = [f"{text} {loss:.3f}" for text, loss in losses.items() if loss > NOISE]
            if lines:
                found.append(f"after {name_of(result['conditions'][name])}: {', '.join(lines)}")
    if not found:
        return []
    return [f"**Each at its best learning rate, it forgets more of other text**, in bits per byte {'; '.join(found)}."]


def _losses(result: Mapping[str, Any], method: str) -> list[str]:
    """Return by how much and where a method is worse than cross-entropy by more than the noise of a data seed."""
    found = []
    for name in _compared(result):
        rows = _rows(result, name)
        gain = (rows[method].gain if method in rows else None) or 0.0
        if gain < -NOISE:
            teacher, ce = _teacher(result, name), rows[summary.BASELINE].test
            passed = teacher is not None and ce < teacher
            why = f", where the student alone passes the teacher ({ce:.3f} and {teacher:.3f})" if passed else ""
            found.append(f"{-gain:.3f} bits per byte on {name_of(result['conditions'][name])}{why}")
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
