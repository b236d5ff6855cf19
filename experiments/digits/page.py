"""Write `docs/evidence.md` and its pictures from the result files.

    python -m experiments.digits.page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages
from experiments.digits.compare import RESOLUTIONS, has_sign
from experiments.digits.methods import CROSS, METHODS, SAME
from experiments.digits.pictures import pictures
from experiments.digits.predictions import outcomes, theory
from experiments.digits.settings import SCALES
from experiments.digits.summary import Measured, Summary, number, spread
from experiments.digits.text import SHOWN, held_out_problems

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "evidence.md"
IMAGES = ROOT / "docs" / "img"
REMARKS = Path(__file__).parent / "remarks.md"
_COLUMNS = (
    ("right answers", "exact_match.all", "%"),
    ("as first line", "exact_match_first.all", "%"),
    ("bits/byte, sources", "bits_per_byte.code", ".3f"),
    ("bits/byte, arithmetic", "bits_per_byte.arithmetic", ".3f"),
    ("KL per answer", "kl_answers", ".2f"),
    ("KL per chunk", "kl_chunks", ".3f"),
    ("numerals", "numerals.all", ".3f"),
    ("right numeral", "numerals.right", ".3f"),
    ("misled", "numerals.misled", ".3f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
)
_NAMES = {path: title for title, path, _ in _COLUMNS}
_KINDS = {
    "answer": "answers of several digits",
    "operand": "operands of several digits",
    "other": "everything else",
}


def rendered() -> dict[Path, str]:
    """Every file that is generated, with its text."""
    full, reduced = (_result(name) for name in ("full", "reduced"))
    files = {PAGE: "\n".join(_page(full, reduced)) + "\n"}
    return files | {IMAGES / name: text for name, text in pictures(full).items()}


def _result(name: str) -> Summary:
    file = RESULTS / f"{name}.json"
    return Summary(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})


def _page(full: Summary, reduced: Summary) -> Iterator[str]:
    yield "<!-- Written by `python -m experiments.digits.page` from the files beside it: change those, not this. -->"
    yield "# Evidence"
    yield ""
    yield _INTRODUCTION
    yield ""
    if not full:
        yield "The full run has not been made."
    else:
        yield from _set_up(full.result)
        yield from ("", "## Outcome", "")
        yield from _table(full)
        yield from ("", "![Right answers](img/evidence-answers.svg)", "")
        yield from ("![Right answers less those of cross-entropy only](img/evidence-gains.svg)", "")
        yield "![Probability where an answer is due](img/evidence-numerals.svg)"
        yield ""
        yield from _by_digits(full)
        yield from ("", "## The teacher's mass", "")
        yield from _mass(full.result)
    yield from ("", "## Predictions", "", _PREDICTED, "")
    yield theory()
    yield ""
    if full:
        yield "| prediction | predicted | measured | |"
        yield "|---|---|---|---|"
        yield from outcomes(full)
        yield ""
    if REMARKS.is_file():
        yield REMARKS.read_text(encoding="utf-8").rstrip()
        yield ""
    yield from _earlier(_result("first"), full)
    yield "## The reduced version"
    yield ""
    yield from _reduced(reduced)
    yield from ("", "## Running it", "", _RUNNING)


_INTRODUCTION = """Does distillation across tokenizers teach anything, and what does the choice of the loss change?
The hardest case is numbers: a student whose tokenizer keeps `579` whole learns from a teacher that reads `5`, `7`,
`9`. The method's paper reports for a Llama-3.2-1B student of a Qwen3-4B teacher that the partitioned (gold) loss
destroys its GSM8k accuracy (2.56), continued training alone has 10.25, distillation from a weaker teacher with the
same tokenizer 12.89, and P-KL 15.54. The same is asked here of models trained from scratch on text of two kinds:
arithmetic, one problem a line (`123+456=579`), and the sources of Python's standard library. Every compared run is
an `xtoken run` with all its processes, and every figure on this page is read from result files."""

_SET_UP = """{where}, Python {python}, torch {torch}, transformers {transformers}. Both tokenizers are byte-level BPE
of the same text. The teacher's ({vocabulary:,} tokens) splits numbers into digits; the student's keeps numbers of up
to {digits} digits whole ({numerals:,} numerals beside {words:,} other tokens). The teacher (Qwen3's architecture,
{teacher:.1f} million weights) and a second one with the student's tokenizer and shape learn from right answers only.
In the text of the students (Llama's architecture, {student:.1f} million weights) {wrong:.0%} of the answers are
wrong in one digit. {seeds} first students are trained with cross-entropy, one per seed; every method goes on from
them for {steps:,} steps of {samples} new documents, with the same optimiser, order and text. Cross-entropy has
weight 0.1 and the divergence weight 1 unless said otherwise; P-KL compares {topk} teacher tokens unless it says all.
Held-out problems are in nobody's text, in neither order; each is asked after {shown} solved problems, the answer is
decoded greedily and must be right to the last digit."""

_COLUMNS_TOLD = """Mean, ± the standard deviation over seeds where there are several. Less CE only: right answers
less those of cross-entropy only from the same first student, in percentage points, seed by seed. As first line:
asked with nothing before. KL per answer: nats, of answers that the digit-splitting teacher draws. KL per chunk: P-KL
over the full vocabulary with the `prob` average, nats, on held-out text of both kinds. Numerals, right numeral,
misled: probability where an answer of several digits is due, on numerals of several digits, on the right answer's
first token, and on numerals that begin with another digit of it. Tokens/s: unpadded, of one run while {side_by_side}
share the machine."""

_MASS_TOLD = """The reference averages a chunk's log-probabilities over its teacher tokens; what is left of the
probability is m. On held-out text, full vocabulary; confidence is the mean probability that the teacher gives to the
tokens that stand there."""

_PREDICTED = """Written down and committed before the first full run, in `experiments/digits/predictions.toml`, and
not changed since."""

_EARLIER = """This page's results are those of the third full run. The first one, made after the same predictions,
was trained from scratch on packed rows that seldom began where a document does, and asked every question as a
document's first line: there the digit-splitting teacher was right in {then:.0%} of the cases, so the methods were
measured where it teaches wrong answers. Now rows begin with a document, questions come after solved problems, and
the teacher with the student's tokenizer has its architecture as well and is trained longer. Nothing else was
changed. Percentage points and probabilities as above:"""

_REDUCED = """Operands of up to {digits} digits, on {cpus} CPU cores, Python {python}, torch {torch}. A slow test
makes P-KL and cross-entropy only again from scratch, {seeds} seeds, and compares sign and spread of their
differences with those below. A difference has a sign where its interval of 95% over the seeds leaves 0 out; of
{problems} held-out problems, few differences in right answers have one."""

_RUNNING = """```sh
make evidence            # the full version, on a GPU
make evidence-reduced    # on a CPU
```

Each calls `python -m experiments.digits` for its stages: `scratch` (text, tokenizers, teachers, first students),
`runs` (the compared runs, several side by side), `measure`. A stage leaves out what is done and stops in order after
`--seconds`; what was stopped goes on from its checkpoint, also on another machine that is given the state's
directory (`--state`). `python -m experiments.digits.page` writes this page."""


def _set_up(result: dict[str, Any]) -> Iterator[str]:
    settings, machine = result["settings"], result["machine"]
    models = {**result["teachers"], **result["students"]}
    weights = {name: found["parameters"] / 1e6 for name, found in models.items()}
    yield _SET_UP.format(
        where=" and ".join(machine["gpus"]) or f"{machine['cpus']} CPU cores",
        python=machine["python"],
        torch=machine["torch"],
        transformers=machine["transformers"],
        vocabulary=settings["teacher_vocabulary"],
        digits=settings["digits"],
        numerals=sum(10**width for width in range(2, settings["digits"] + 1)),
        words=settings["student_words"],
        teacher=weights[CROSS],
        shown=SHOWN,
        student=weights[next(iter(result["students"]))],
        wrong=settings["wrong"],
        seeds=settings["seeds"],
        steps=settings["go_on"]["steps"],
        samples=settings["go_on"]["samples"],
        topk=settings["go_on"]["vocab_topk"],
    )


def _rows(summary: Summary) -> list[tuple[str, list[Measured]]]:
    """Everything that has been measured, by title; methods that have not run with nothing."""
    found = [
        ("teacher, digits", summary.teacher(CROSS)),
        ("teacher, student's tokenizer", summary.teacher(SAME)),
        ("first students", summary.students()),
    ]
    return [row for row in found if row[1]] + [(m.title, summary.runs(name)) for name, m in METHODS.items()]


def _table(summary: Summary) -> Iterator[str]:
    yield _COLUMNS_TOLD.format(side_by_side=summary.result["settings"]["side_by_side"])
    yield ""
    yield f"| | seeds | less CE only | {' | '.join(title for title, _, _ in _COLUMNS)} |"
    yield "|---" * (len(_COLUMNS) + 3) + "|"
    gains = {m.title: summary.difference(name, "ce", _COLUMNS[0][1]) for name, m in METHODS.items() if name != "ce"}
    for title, found in _rows(summary):
        cells = [spread([number(one, path) for one in found], form) for _, path, form in _COLUMNS]
        if not found:
            cells[0] = "not run"
        yield f"| {title} | {len(found)} | {_gain(gains.get(title, []))} | {' | '.join(cells)} |"


def _gain(values: list[float]) -> str:
    """Percentage points, seed by seed: students differ more from one another than methods do."""
    if not values:
        return ""
    told = f"{100 * statistics.fmean(values):+.1f}"
    return told if len(values) == 1 else f"{told} ± {100 * statistics.stdev(values):.1f}"


def _by_digits(summary: Summary) -> Iterator[str]:
    digits = [str(d) for d in range(1, summary.result["settings"]["digits"] + 1)]
    yield "Right answers by the number of digits of the longer operand:"
    yield ""
    yield f"| | {' | '.join(digits)} |"
    yield "|---" * (len(digits) + 1) + "|"
    for title, found in _rows(summary):
        cells = [spread([number(one, f"exact_match.{d}") for one in found], "%") for d in digits]
        yield f"| {title} | {' | '.join(cells if found else ['not run', *cells[1:]])} |"


def _mass(result: dict[str, Any]) -> Iterator[str]:
    yield _MASS_TOLD
    yield ""
    yield "| chunks | teacher tokens | how many | confidence | m |"
    yield "|---|---|---|---|---|"
    for row in result["mass"]:
        figures = f"{row['chunks']:,} | {row['confidence']:.3f} | {row['mass']:.3f}"
        yield f"| {_KINDS[row['kind']]} | {row['tokens']} | {figures} |"


def _earlier(first: Summary, full: Summary) -> Iterator[str]:
    """The first full run, if its results are there."""
    if not first or not full:
        return
    then = number(first.result["teachers"][CROSS], "exact_match.all") or 0.0
    yield from ("## The first full run", "", _EARLIER.format(then=then), "")
    yield "| | less CE only, then | now | numerals, then | now |"
    yield "|---|---|---|---|---|"
    for name, method in METHODS.items():
        gains = [
            _gain(some.difference(name, "ce", "exact_match.all")) if name != "ce" else "" for some in (first, full)
        ]
        masses = [spread([number(one, "numerals.all") for one in some.runs(name)], ".3f") for some in (first, full)]
        yield f"| {method.title} | {gains[0]} | {gains[1]} | {masses[0]} | {masses[1]} |"
    yield ""


def _reduced(summary: Summary) -> Iterator[str]:
    if not summary:
        yield "It has not been run."
        return
    machine, settings = summary.result["machine"], summary.result["settings"]
    yield _REDUCED.format(
        digits=settings["digits"],
        cpus=machine["cpus"],
        python=machine["python"],
        torch=machine["torch"],
        seeds=settings["seeds"],
        problems=sum(len(some) for some in held_out_problems(SCALES[settings["name"]]).values()),
    )
    yield ""
    yield "| P-KL less cross-entropy only | mean | sign |"
    yield "|---|---|---|"
    for measure, resolution in RESOLUTIONS.items():
        values = summary.difference("p_kl", "ce", measure)
        sign = ("+" if statistics.fmean(values) > 0 else "-") if has_sign(values, resolution=resolution) else "none"
        yield f"| {_NAMES[measure]} | {spread(values, '+.3f')} | {sign} |"
    yield ""
    yield from _table(summary)


def main() -> int:
    """Write the page, or say whether it is up to date."""
    return pages.command(__doc__, rendered)


if __name__ == "__main__":
    raise SystemExit(main())
