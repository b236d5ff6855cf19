"""The default loss with a strong and with a weak teacher, as a table for the page: from `results/strong.json`."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.real import instructions, methods, plan, predictions, word_problems
from experiments.real.picture import bars
from experiments.real.summary import BASELINE, CHAIN, FIRST_SEED, TASK, VALIDATION, Outcome, markdown_table, outcomes
from xtoken_services.trainer.best import LEAST_PATIENCE

RESULT = Path(__file__).parent / "results" / "strong.json"
ADAPTIVE, FADING = "chain_adaptive", "chain_fading"
OTHERS = (CHAIN, FADING, "p_kl_scaled", "alm1", "bpm", "x_token_v6")
TEXTS = (plan.PYTHON, plan.GERMAN, plan.FRENCH, plan.WEAK, plan.WEAK_LONG)
TEACHER_NAMES = {methods.QWEN15: "Qwen2.5-Coder-1.5B", methods.GEMMA3: "Gemma 3 270M"}
ENGLISH = "handbook-en.test"
NOT_RUN = "not run"
KEPT = f"{TASK}{word_problems.PROBLEMS.task}"
AGAIN = (
    methods.AGAIN, methods.PART_ON, methods.PART_LONG, methods.MID_ON, methods.MID_LONG, methods.MID_ALL,
    methods.FEW_ON, methods.ALONE_ON, *(f"{name}-on" for name in methods.ORDER_SIZES), methods.ORDERS_ALL,
)  # fmt: skip
"""Conditions that continue a cold start of their own, in the table's order."""
PATIENCES = (2, 3, 5, 8, None)
"""Values of `eval.patience`; None: the default."""


def section() -> dict[str, Any]:
    """Return the result file's content, with its tables and the numbers of predictions judged and not met."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    verdicts = Counter(row.rsplit("|", 2)[1].strip() for row in predictions.compare(result))
    missed = verdicts["**not**"]
    tables = {
        f.__name__: f(result)
        for f in (table, losses, forms, students, problems, on_policy, p_kl, early_ends, two_texts, followed)
    }
    return {
        **result,
        **tables,
        "over": over_text(result),
        "judged": missed + verdicts["as predicted"],
        "missed": missed,
        "problem_count": f"{word_problems.TRAINED:,}",
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the default and the others against cross-entropy in Markdown, the texts with the strongest teacher first.

    Args:
        result: Content of the result file.
    """
    head = (
        "text | teacher, alone | before | cross-entropy | default: chain, adaptive | its gain, each data seed | "
        "part of the way to the teacher | steps to cross-entropy's best | English: before, cross-entropy, default"
    )
    found = _by_method(result)
    rows = (_line(result, found, name) for name in result["conditions"] if name in TEXTS)
    return markdown_table(head.split(" | "), rows)


def losses(result: Mapping[str, Any]) -> str:
    """Return the gains of every loss over cross-entropy on each text, on the first data seed, in Markdown."""
    found = _by_method(result)
    shown = (ADAPTIVE, *OTHERS)
    rows = []
    for name in TEXTS:
        gains = [_gain(result, found, name, method) for method in shown]
        rows.append([name_of_text(result, name), *(NOT_RUN if gain is None else f"{gain:+.3f}" for gain in gains)])
    return markdown_table(["text", *(methods.TITLES[name] for name in shown)], rows)


def picture(result: Mapping[str, Any]) -> str:
    """Return the picture of what the default and the best published loss gain on each text."""
    found = _by_method(result)
    rows = [
        (f"{name_of_text(result, name)}: {title}", gain, colour)
        for name in (*TEXTS, plan.TO_GEMMA)
        for method, title, colour in ((ADAPTIVE, "default", "a"), ("p_kl_scaled", "P-KL", "b"))
        if (gain := _gain(result, found, name, method)) is not None
    ]
    legend = "bits per byte below cross-entropy alone, held-out text, first data seed"
    words = "; ".join(f"{name}: {value:+.3f}" for name, value, _ in rows)
    return bars("What a teacher with another tokenizer adds", f"{legend}. {words}.", legend, rows, (0.0, 0.08, 0.02))


def name_of_text(result: Mapping[str, Any], name: str) -> str:
    """Return a condition's text, with its size or its student where that is not the usual one."""
    condition = result["conditions"][name]
    detail = f" {condition['note']}" if name == plan.TO_GEMMA else f", {condition['size'] / 1e6:g} MB"
    return f"{condition['source']}{detail}"


def _gain(result: Mapping[str, Any], found: Mapping[Any, Any], name: str, method: str) -> float | None:
    text = f"{result['conditions'][name]['source']}.test"
    own = found[name, method].get(FIRST_SEED) if (name, method) in found else None
    gain: float | None = None if own is None else found[name, BASELINE][FIRST_SEED].bits[text] - own.bits[text]
    return gain


def forms(result: Mapping[str, Any]) -> str:
    """Return the forms of the weight with a teacher that the student passes: bits per byte, best and last step."""
    names = [name for name in TEXTS if result["conditions"][name]["teacher"] == methods.GEMMA3]
    texts = [f"{result['conditions'][name]['size'] / 1e6:g} MB: best step, last step" for name in names]
    found, rows = _by_method(result), []
    for method in (BASELINE, CHAIN, FADING, ADAPTIVE):
        cells = []
        for name in names:
            outcome = found[name, method][FIRST_SEED]
            text = f"{result['conditions'][name]['source']}.test"
            last = _curve(result, outcome)[-1][f"{VALIDATION}_{text}"]
            cells.append(f"{outcome.bits[text]:.3f}, {last:.3f}")
        rows.append([methods.TITLES[method], *cells])
    return markdown_table(["weight of the divergence", *texts], rows)


def students(result: Mapping[str, Any]) -> str:
    """Return every method of the other students: its best rate, bits per byte, and its part of the way."""
    head = "student | method | rate | bits per byte | part of the way from cross-entropy to the teacher | English"
    found, rows = _by_method(result), []
    for name in (plan.TO_GEMMA, plan.TO_QWEN):
        condition = result["conditions"][name]
        text = f"{condition['source']}.test"
        teacher, ce = result["teachers"][name][f"{VALIDATION}_{text}"], found[name, BASELINE][FIRST_SEED].bits[text]
        for method in (BASELINE, CHAIN, FADING, *methods.DROPPED_FORMS, ADAPTIVE, "kd_same"):
            if outcome := found.get((name, method), {}).get(FIRST_SEED):
                bits = outcome.bits[text]
                share = "" if method == BASELINE else f"{(ce - bits) / (ce - teacher):.0%}"
                name_of_student = condition["note"].removeprefix("to ")
                cells = (name_of_student, methods.TITLES[method], f"{outcome.rate:g}", f"{bits:.3f}", share)
                rows.append([*cells, f"{outcome.bits[ENGLISH]:.3f}"])
    return markdown_table(head.split(" | "), rows)


def p_kl(result: Mapping[str, Any]) -> str:
    """Return the gains of P-KL on German over cross-entropy with each data seed."""
    found, text = _by_method(result), f"{result['conditions'][plan.GERMAN]['source']}.test"
    ces, own = found[plan.GERMAN, BASELINE], found[plan.GERMAN, "p_kl_scaled"]
    return ", ".join(f"{ces[seed].bits[text] - own[seed].bits[text]:+.3f}" for seed in sorted(own))


def problems(result: Mapping[str, Any]) -> str:
    """Return the runs on word problems, each method at its best rate; of several data seeds, figures are means."""
    right = KEPT
    head = (
        "rate | right answers at the end, each data seed | before, half-way, at the end | bits per byte of "
        "held-out answers, before and at the end | English"
    )
    lines = []
    if teacher := result["teachers"].get(plan.PROBLEMS):
        lines.append(["the teacher, shown two solved problems", "", f"{teacher[right]:.1%}", "", "", ""])
    for (_, method, rate), by_seed in sorted(
        _best_rates(_by_rate(result, plan.PROBLEMS), right).items(),
        key=lambda item: fmean(run["curve"][-1][right] for run in item[1].values()),
    ):
        ends = [run["curve"][-1] for run in by_seed.values()]
        starts = [run["curve"][0] for run in by_seed.values()]
        halves = [next(row for row in run["curve"] if 2 * row["step"] >= run["steps"]) for run in by_seed.values()]
        answers = f"{VALIDATION}_{word_problems.PROBLEMS.source}.test"
        cells = (
            _at_end(by_seed, right),
            ", ".join(f"{fmean(row[right] for row in rows):.1%}" for rows in (starts, halves, ends)),
            ", ".join(f"{fmean(row[answers] for row in rows):.3f}" for rows in (starts, ends)),
            f"{fmean(row[f'{VALIDATION}_{ENGLISH}'] for row in ends):.3f}",
        )
        lines.append([methods.TITLES[method], f"{rate:g}", *cells])
    return markdown_table(["", *head.split(" | ")], lines)


def on_policy(result: Mapping[str, Any]) -> str:
    """Return right answers of the runs that continue a cold start, by data seed, in Markdown."""
    head = (
        "rate | right answers, each data seed | change from the cold start, mean | entropy of completions, nats: "
        "begin, most"
    )
    lines = []
    for condition in (methods.COLD_START, plan.ON_POLICY, *AGAIN):
        key = f"{TASK}{methods.CONDITIONS[condition].task}"
        runs = sorted(_best_rates(_by_rate(result, condition), key).items())
        if runs and condition in AGAIN:
            starts = [run["curve"][0] for run in runs[0][1].values()]
            before = " ".join(f"{start[key]:.1%}" for start in starts)
            ends = [run["curve"][-1] for _, by_seed in runs for run in by_seed.values()]
            bits = (
                f"{fmean(start['bits_per_byte'] for start in starts):.3f}, "
                f"teacher {max(end.get('teacher_bits_per_byte', 0.0) for end in ends):.3f}"
            )
            lines.append([f"**{methods.CONDITIONS[condition].note}** (bits per byte {bits})", "", before, "", ""])
        for (_, method, rate), by_seed in runs:
            change = fmean(run["curve"][-1][key] - run["curve"][0][key] for run in by_seed.values())
            cold = condition == methods.COLD_START
            title = methods.TITLES[method].replace(" only", ": cold start" if cold else " continued")
            title = title.removesuffix(", one weight to the end, teacher reads solved problems")
            title = title.replace("completions, JSD, teacher at .5", "completions")
            change_cell = "" if cold else f"{100 * change:+.1f} points"
            lines.append([title, f"{rate:g}", _at_end(by_seed, key), change_cell, _of_completions(by_seed)[0]])
    return markdown_table(["", *head.split(" | ")], lines)


def over_text(result: Mapping[str, Any]) -> dict[str, str]:
    """Return by how many points completions end above the better kind of text: the mean, and the data seeds' range.

    Completions of all prompts stand beside text of the answers that their cold start had.

    Args:
        result: Content of the result file.

    Returns:
        By condition: those in which the default of completions, cross-entropy and chain have run.
    """
    told = {}
    for condition in AGAIN:
        of_text = {methods.MID_ALL: methods.MID_ON, methods.ORDERS_ALL: methods.ORDERS_ON}.get(condition, condition)
        completions = _right_at_end(result, condition).get("on_jsd_sharp", {})
        text = [_right_at_end(result, of_text).get(method, {}) for method in (BASELINE, "chain_shots")]
        if seeds := completions.keys() & text[0].keys() & text[1].keys():
            better = max(text, key=lambda of: fmean(of[seed] for seed in seeds))
            over = [completions[seed] - better[seed] for seed in seeds]
            spread = f"{min(over):.1f} to {max(over):.1f}" if len(over) > 1 else "one seed"
            told[condition] = f"{fmean(over):.1f} points ({spread})"
    return told


def _right_at_end(result: Mapping[str, Any], condition: str) -> dict[str, dict[int, float]]:
    """Return the percentage of right answers by method, at its best rate, and data seed."""
    key = f"{TASK}{methods.CONDITIONS[condition].task}"
    return {
        method: {seed: 100 * run["curve"][-1][key] for seed, run in by_seed.items()}
        for (_, method, _), by_seed in _best_rates(_by_rate(result, condition), key).items()
    }


def followed(result: Mapping[str, Any]) -> str:
    """Return the instructions that students follow, by condition, of each method at its best rate, in Markdown.

    Empty if none has run.
    """
    names = (methods.START, methods.INSTRUCTIONS, methods.FEW, methods.FOR_GEMMA)
    most_likely, drawn = (f"{TASK}{name}" for name in (instructions.TASK, instructions.SAMPLED))
    runs = {
        key: found
        for key, by_seed in _by_rate(result, *names).items()
        if (found := {seed: run for seed, run in by_seed.items() if most_likely in run["curve"][-1]})
    }
    if not runs:
        return ""
    head = (
        "rate | followed, each data seed | at temperature 1, mean | word problems, mean | entropy: begin, most "
        "| completions that end: begin, fewest"
    )
    teacher = result["teachers"].get(methods.INSTRUCTIONS, {})
    lines: list[Sequence[str]] = [["the teacher", "", f"{teacher.get(most_likely, math.nan):.1%}", *[""] * 4]]
    for name in names:
        of_it = {key: by_seed for key, by_seed in runs.items() if key[0] == name}
        if len({method for _, method, _ in of_it}) == 1 and name != methods.START:
            continue  # nothing to compare it with
        if starts := [run["curve"][0] for by_seed in of_it.values() for run in by_seed.values()]:
            before = [f"{fmean(row.get(key, math.nan) for row in starts):.1%}" for key in (most_likely, drawn)]
            lines.append([f"**{methods.CONDITIONS[name].note}**: the student before", "", *before, *[""] * 3])
        if name == methods.START:
            continue  # the next condition's student before is its student
        for (_, method, rate), by_seed in sorted(_best_rates(of_it, most_likely).items()):
            ends = [run["curve"][-1] for run in by_seed.values()]
            kept = [row[KEPT] for row in ends if KEPT in row]
            cells = (f"{fmean(row[drawn] for row in ends):.1%}", f"{fmean(kept):.1%}" if kept else "")
            title = methods.TITLES[method]
            lines.append([title, f"{rate:g}", _at_end(by_seed, most_likely), *cells, *_of_completions(by_seed)])
    return markdown_table(["", *head.split(" | ")], lines)


def _by_rate(result: Mapping[str, Any], *conditions: str) -> dict[tuple[str, str, float], dict[int, Any]]:
    """Return the runs of conditions by condition, method and rate, then by data seed."""
    runs: dict[tuple[str, str, float], dict[int, Any]] = defaultdict(dict)
    for run in sorted(result["runs"], key=lambda run: int(run["seed"])):
        if run["condition"] in conditions:
            runs[run["condition"], run["method"], run["rate"]][run["seed"]] = run
    return runs


def _best_rates(
    runs: Mapping[tuple[str, str, float], dict[int, Any]], key: str
) -> dict[tuple[str, str, float], dict[int, Any]]:
    """Return of every method the runs at one learning rate: where a figure is highest at the end, of most seeds."""
    score = {at: (len(seeds), fmean(run["curve"][-1][key] for run in seeds.values())) for at, seeds in runs.items()}
    return {at: runs[at] for at in runs if score[at] == max(score[other] for other in runs if other[:2] == at[:2])}


def _at_end(by_seed: Mapping[int, Any], key: str) -> str:
    return " ".join(f"{run['curve'][-1][key]:.1%}" for run in by_seed.values())


def _of_completions(by_seed: Mapping[int, Any]) -> tuple[str, str]:
    """Return the cells of entropy and of finished completions: of the first data seed; empty for given text."""
    figures = next(iter(by_seed.values()))["metrics"]
    if "entropy" not in figures:
        return "", ""
    (begin, _, most, _), (ended, fewest, _, _) = figures["entropy"], figures["finished"]
    return f"{begin:.2f}, {most:.2f}", f"{ended:.0%}, {fewest:.0%}"


TWO_TEACHERS = {
    "chain_routed": "taught by each on its own text",
    "chain_routed_twice": "the same, Gemma with weight 2",
    "chain": "taught by Qwen alone",
    "chain_second": "taught by the trained Gemma alone",
    "chain_both": "taught by both on everything",
}


def two_texts(result: Mapping[str, Any]) -> str:
    """Return both teachers on two texts, and a student of each choice among them, in Markdown; empty if none has run.

    Figures are bits per byte after the last step, one for each data seed.
    """
    names = [f"{methods.CONDITIONS[name].source}.test" for name in (methods.GERMAN_TEACHER, methods.TWO_TEXTS)]
    texts = [f"{VALIDATION}_{name}" for name in (*names, ENGLISH)]
    of_both = _by_rate(result, methods.GERMAN_TEACHER, methods.TWO_TEXTS)
    runs = {key[1:]: [*by_seed.values()] for key, by_seed in of_both.items()}
    trained, routed = ((BASELINE, methods.CONDITIONS[methods.GERMAN_TEACHER].rates[0]), ("chain_routed", 4e-4))
    if not {trained, routed} <= runs.keys():
        return ""
    (gemma,), student = runs.pop(trained), runs[routed][0]
    rows = {
        TEACHER_NAMES[methods.QWEN15]: [result["teachers"][methods.GERMAN_TEACHER]],
        TEACHER_NAMES[methods.GEMMA3]: [gemma["curve"][0]],
        f"the same after {gemma['steps']} steps of German": [gemma["curve"][-1]],
        "the student before": [student["curve"][0]],
    } | {
        f"{TWO_TEACHERS[method]}, {rate:g}": [run["curve"][-1] for run in found]
        for (method, rate), found in runs.items()
    }
    lines = ["| | manual-de | python-packages | English |", "|---|---|---|---|"]
    for title, ends in rows.items():
        lines.append(f"| {title} | {' | '.join(' '.join(f'{end[text]:.3f}' for end in ends) for text in texts)} |")
    return "\n".join(lines)


def early_ends(result: Mapping[str, Any]) -> str:
    """Return the steps that `eval.patience` leaves out of the runs, and their bits per byte, in Markdown."""
    left_out = (plan.PROBLEMS, "qwen-instructions", methods.GERMAN_TEACHER, methods.TWO_TEXTS)
    runs = [run for run in result["runs"] if not run["condition"].startswith(left_out)]
    curves = [[(row["step"], row[VALIDATION]) for row in run["curve"][1:]] for run in runs]
    best = [min(curve, key=lambda at: at[1]) for curve in curves]
    steps = sum(curve[-1][0] for curve in curves)
    head = (
        f"`eval.patience` | of {len(curves)} runs end early | before their best step | these lose, bits per byte | "
        f"steps left out, of {steps - sum(step for step, _ in best):,} after the best"
    )
    lines = []
    for patience in PATIENCES:
        ends = [end_of(curve, patience or max(LEAST_PATIENCE, math.ceil(len(curve) / 2))) for curve in curves]
        losses = [bits - least for (_, bits), (_, least) in zip(ends, best, strict=True) if bits > least]
        early = sum(step < curve[-1][0] for (step, _), curve in zip(ends, curves, strict=True))
        lost = f"{min(losses):.4f} to {max(losses):.4f}" if losses else "0"
        cells = (patience or '"half" (default)', early, len(losses), lost, f"{steps - sum(step for step, _ in ends):,}")
        lines.append(cells)
    return markdown_table(head.split(" | "), lines)


def end_of(curve: Sequence[tuple[int, float]], patience: int) -> tuple[int, float]:
    """Return the step at which a run with this `eval.patience` ends, and the fewest bits per byte until then."""
    least, since = math.inf, 0
    for step, bits in curve:
        since = 0 if bits < least else since + 1
        least = min(bits, least)
        if since == patience:
            return step, least
    return curve[-1][0], least


def _by_method(result: Mapping[str, Any]) -> dict[tuple[str, str], dict[int, Outcome]]:
    """Return the outcomes by condition and method, then by data seed."""
    found: dict[tuple[str, str], dict[int, Outcome]] = defaultdict(dict)
    for each in outcomes(result):
        found[each.condition, each.method][each.seed] = each
    return found


def _line(result: Mapping[str, Any], found: Mapping[tuple[str, str], Mapping[int, Outcome]], name: str) -> list[str]:
    condition = result["conditions"][name]
    text = f"{condition['source']}.test"
    ces, defaults = found[name, BASELINE], found[name, ADAPTIVE]
    ce, default = ces[FIRST_SEED], defaults[FIRST_SEED]
    before = _curve(result, ce)[0]
    teacher = result["teachers"][name][f"{VALIDATION}_{text}"]
    seeds = sorted(ces.keys() & defaults.keys())
    own = [ces[seed].bits[text] - defaults[seed].bits[text] for seed in seeds]
    gain, behind = fmean(own), fmean(ces[seed].bits[text] for seed in seeds) - teacher
    each = f" ({', '.join(f'{one:.3f}' for one in own)})" if len(own) > 1 else ""
    english = (before[f"{VALIDATION}_{ENGLISH}"], ce.bits[ENGLISH], default.bits[ENGLISH])
    return [
        name_of_text(result, name),
        f"{TEACHER_NAMES[condition['teacher']]}: {teacher:.3f}",
        f"{before[f'{VALIDATION}_{text}']:.3f}",
        f"{fmean(ces[seed].bits[text] for seed in seeds):.3f} at {ce.rate:g}",
        f"{fmean(defaults[seed].bits[text] for seed in seeds):.3f} at {default.rate:g}",
        f"**{gain:+.3f}**{each}",
        f"{gain / behind:.0%}" if behind > 0 else "passes it",
        ", ".join(_steps(result, ces[seed], defaults[seed]) for seed in seeds),
        ", ".join(f"{bits:.3f}" for bits in english),
    ]


def _curve(result: Mapping[str, Any], outcome: Outcome) -> list[dict[str, float]]:
    """Return the evaluations of the run that an outcome is of."""
    of = ("condition", "method", "weight", "rate", "seed")
    return next(run["curve"] for run in result["runs"] if all(run[key] == getattr(outcome, key) for key in of))


def _steps(result: Mapping[str, Any], ce: Outcome, default: Outcome) -> str:
    """Return the steps after which the default is as good on validation as cross-entropy at its best, and its."""
    least = min(row[VALIDATION] for row in _curve(result, ce))
    reached = next((row["step"] for row in _curve(result, default) if row[VALIDATION] <= least), None)
    return f"{reached:g} of {ce.step}" if reached is not None else "not reached"
