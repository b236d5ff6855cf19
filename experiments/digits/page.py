"""Write `docs/evidence.md` and its pictures from the result files and the template `page.md.j2`.

    python -m experiments.digits.page [--check]

With `--check` nothing is written; the exit status is 1 if a file is out of date.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import render, write
from experiments.digits.compare import RESOLUTIONS, has_sign
from experiments.digits.methods import CROSS, METHODS, SAME
from experiments.digits.pictures import pictures
from experiments.digits.predictions import outcomes, theory
from experiments.digits.settings import SCALES
from experiments.digits.summary import Measured, Summary, number, spread
from experiments.digits.text import SHOWN, held_out_problems
from experiments.real import overview
from experiments.real.page import RESULT as REAL

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "evidence.md"
IMAGES = ROOT / "docs" / "img"
REMARKS = Path(__file__).parent / "remarks.md"
TEMPLATE = Path(__file__).parent / "page.md.j2"
COLUMNS = (
    ("right answers", "exact_match.all", "%"),
    ("as first line", "exact_match_first.all", "%"),
    ("bits/byte, sources", "bits_per_byte.code", ".3f"),
    ("bits/byte, arithmetic", "bits_per_byte.arithmetic", ".3f"),
    ("KL per answer", "kl_answers", ".2f"),
    ("KL per chunk", "kl_chunks", ".3f"),
    ("numerals", "numerals.all", ".3f"),
    ("right numeral", "numerals.right", ".3f"),
    ("misled", "numerals.misled", ".3f"),
)
KINDS = {
    "answer": "answers of several digits",
    "operand": "operands of several digits",
    "other": "everything else",
}


def rendered() -> dict[Path, str]:
    """Return every generated file with its text."""
    full = summary("full")
    return {PAGE: page(full)} | {IMAGES / name: text for name, text in pictures(full).items()}


def summary(name: str) -> Summary:
    """Return the result file of a scale; an empty one if it is missing."""
    file = RESULTS / f"{name}.json"
    return Summary(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})


def page(full: Summary) -> str:
    """Return the page for a full run, beside the stored first and reduced ones."""
    reduced = summary("reduced")
    real = json.loads(REAL.read_text(encoding="utf-8"))
    scale = SCALES[reduced.result["settings"]["name"]] if reduced else None
    return render(
        TEMPLATE,
        full=full, first=summary("first"), reduced=reduced,
        rows=rows, cells=cells, gain=gain, less=less, by_digits=by_digits, masses=masses, number=number,
        methods=METHODS, columns=COLUMNS, kinds=KINDS, CROSS=CROSS, shown=SHOWN,
        numerals=sum(10**width for width in range(2, full.result["settings"]["digits"] + 1)) if full else 0,
        theory=theory(), outcomes=list(outcomes(full)) if full else [],
        remarks=REMARKS.read_text(encoding="utf-8").rstrip(),
        signs=list(signs(reduced)) if reduced else [],
        missing=[(title, *brief[1:]) for title, *brief in briefly(summary("third"), without=full)],
        choice=summary("choice"), chosen=list(briefly(summary("choice"))),
        real=overview.table(real),
        worse=overview.worse(real),
        fitted=overview.fitted_rates(real),
        other_rates=overview.other_rates(real),
        lacking=lacking(full, reduced),
        papers=papers(full),
        past=overview.past_the_best(real),
        problems=sum(map(len, held_out_problems(scale).values())) if scale else 0,
    )  # fmt: skip


def rows(results: Summary) -> list[tuple[str, list[Measured]]]:
    """Return everything measured by title."""
    models = [
        ("teacher, digits", results.teacher(CROSS)),
        ("teacher, student's tokenizer", results.teacher(SAME)),
        ("first students", results.students()),
        *((method.title, results.runs(name)) for name, method in METHODS.items()),
    ]
    return [row for row in models if row[1]]


def lacking(full: Summary, reduced: Summary) -> str:
    """Return in sentences which methods the full size lacks, and which of them the reduced size has.

    Args:
        full: Measurements of the full size.
        reduced: Measurements of the reduced size.
    """
    without = [name for name in METHODS if full and not full.runs(name)]
    groups = {
        "Not run at this size, but at the [reduced one](#the-reduced-version)": [
            METHODS[name].title for name in without if reduced and reduced.runs(name)
        ],
        "Not run at all": [METHODS[name].title for name in without if not (reduced and reduced.runs(name))],
    }
    return " ".join(f"{words}: {'; '.join(titles)}." for words, titles in groups.items() if titles)


def briefly(results: Summary, *, without: Summary | None = None) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield title, number of first students, gain, right answers and bits per byte of what has run.

    Args:
        results: The measurements.
        without: Methods that have run here are left out.
    """
    for name, method in METHODS.items():
        runs = results.runs(name) if results else []
        if runs and not (without and without.runs(name)):
            right, bits = (
                spread([number(run, path) for run in runs], form)
                for path, form in (("exact_match.all", "%"), ("bits_per_byte.code", ".3f"))
            )
            yield method.title, str(len(runs)), gain(results, method.title), right, bits


def cells(runs: list[Measured]) -> list[str]:
    """Return a row's cells, one per column."""
    return [spread([number(run, path) for run in runs], form) for _, path, form in COLUMNS]


def by_digits(runs: list[Measured], digits: list[int]) -> list[str]:
    """Return the right answers of a row by the number of digits."""
    return [spread([number(run, f"exact_match.{d}") for run in runs], "%") for d in digits]


def gain(results: Summary, title: str) -> str:
    """Return a method's gain over cross-entropy only, seed by seed, in percentage points.

    Students differ more from one another than methods do, so only differences of one seed are compared.
    """
    names = [name for name, method in METHODS.items() if method.title == title and name != "ce"]
    values = results.difference(names[0], "ce", "exact_match.all") if names else []
    if not values:
        return ""
    mean = f"{100 * statistics.fmean(values):+.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def papers(results: Summary) -> str:
    """Return in words which losses of papers give more and fewer right answers than chain; empty if none has run.

    Args:
        results: The measurements.
    """
    found: dict[bool, list[str]] = {True: [], False: []}
    for name, method in METHODS.items():
        values = results.difference(name, "chain", "exact_match.all") if results and method.custom else []
        if values:
            mean = statistics.fmean(values)
            found[mean > 0].append(f"{method.title} {100 * mean:+.1f} ({len(values)})")
    parts = [f"{word} {', '.join(found[key])}" for key, word in ((True, "**more**:"), (False, "fewer:")) if found[key]]
    return "; ".join(parts)


def less(
    results: Summary, name: str, other: str, measure: str = "exact_match.all", scale: float = 100, form: str = "+.1f"
) -> str:
    """Return a measure of one method less that of another from the same first students; "not run" without both.

    Args:
        results: The measurements.
        name: The method.
        other: The one that is subtracted.
        measure: Path of the measure; by default right answers, in percentage points.
        scale: Factor of the difference.
        form: Format of the mean.
    """
    values = results.difference(name, other, measure) if results else []
    return spread([scale * value for value in values], form) or "not run"


def masses(results: Summary, name: str) -> str:
    """Return the probability that a method leaves to numerals."""
    return spread([number(run, "numerals.all") for run in results.runs(name)], ".3f")


def signs(results: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield what has a sign in P-KL less cross-entropy: name, mean and sign."""
    names = {path: title for title, path, _ in COLUMNS}
    for measure, resolution in RESOLUTIONS.items():
        values = results.difference("p_kl", "ce", measure)
        sign = ("+" if statistics.fmean(values) > 0 else "-") if has_sign(values, resolution=resolution) else "none"
        yield names[measure], spread(values, "+.3f"), sign


if __name__ == "__main__":
    raise SystemExit(write(rendered, __doc__))
