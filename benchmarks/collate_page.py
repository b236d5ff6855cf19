"""Write the figures of alignment, collation and projection into `docs/performance.md`, from the benchmarks' JSON.

    python -m benchmarks.collate_page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "collate.json"
WORKERS = ROOT / "benchmarks" / "results" / "collate_workers.json"
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- collation: written by benchmarks/collate_page.py -->", "<!-- end of collation -->"

ALIGNED_PER_S, TIMES_TRL, OF_TOKENIZING, PROJECTION_S, TWO_OF_ONE = 8e6, 8.0, 0.85, 5.0, 1.8
"""What must be reached."""


def figures(result: dict[str, Any], workers: dict[str, Any]) -> str:
    """The generated part of the page."""
    return "\n".join([START, _setting(result, workers), "", *_rows(result), "", *_bounds(result, workers), END])


def _setting(result: dict[str, Any], workers: dict[str, Any]) -> str:
    machine, settings, two = result["machine"], result["settings"], workers["settings"]
    own = workers["rows_per_cpu_s"]
    return (
        f"One run of {settings['seconds']:.0f} s on one of {machine['cores']} cores ({machine['processor']}, load "
        f"{machine['load']:.1f} at its end), medians of {settings['turns']} turns, alignment in "
        f"batches of {settings['batch']}: "
        f"Python {machine['python']}, numpy {machine['numpy']}, torch {machine['torch']}, tokenizers "
        f"{machine['tokenizers']}, TRL {machine['trl']}. "
        f"The two collators: another run, {two['turns']} turns of {two['seconds']:g} s each, load "
        f"{workers['machine']['load']:.1f} at its end; in a second of its CPU time a collator made "
        f"{own['one']:.0f} rows alone and {own['two']:.0f} beside the other, and the queue took "
        f"{workers['queue_cores']['two']:.0%} of a core.{_of_others(workers['machine'])}"
    )


def _of_others(machine: dict[str, Any]) -> str:
    """What must be known of a measurement on a busy machine."""
    if machine["load"] <= machine["cores"] + 2:  # two collators and the queue
        return ""
    return " So many other processes ran that two collators also got two shares of the machine: that ratio says little."


def _rows(result: dict[str, Any]) -> Iterator[str]:
    yield "| pair | text | tokens | align only, M tokens/s | times TRL's walk | collator, of tokenizing only |"
    yield "|---|---|---|---|---|---|"
    for aligned, collated in zip(result["align"], result["collator"], strict=True):
        yield (
            f"| {aligned['pair']} | {aligned['corpus']} | {aligned['cap']:,} | "
            f"{aligned['student_tokens_per_s'] / 1e6:.1f} | {aligned['times_offset_walk']:.1f} | "
            f"{collated['rate_of_tokenizing']:.2f} |"
        )


def bounds(result: dict[str, Any], workers: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """What must hold, what the run gave (the worst of all rows), the limit, and whether it held."""
    slowest = min(row["student_tokens_per_s"] for row in result["align"])
    least = min(row["times_offset_walk"] for row in result["align"])
    whole = min(row["rate_of_tokenizing"] for row in result["collator"])
    unequal = sum(not row["equal_chunks"] for row in result["align"])
    seconds, differ = result["projection"]["seconds"], float(not result["projection"]["identical"])
    two = workers["two_of_one"]
    return [
        ("rows with a chunk that does not spell the same", unequal, "0", not unequal),
        (
            "align only, M student tokens/s",
            slowest / 1e6,
            f"at least {ALIGNED_PER_S / 1e6:g}",
            slowest >= ALIGNED_PER_S,
        ),
        ("align only, times TRL's offset walk", least, f"at least {TIMES_TRL:g}", least >= TIMES_TRL),
        ("collator, of merely tokenizing", whole, f"at least {OF_TOKENIZING:g}", whole >= OF_TOKENIZING),
        ("projection of 130,000 tokens each, s", seconds, f"under {PROJECTION_S:g}", seconds < PROJECTION_S),
        ("projections of two processes that differ", differ, "0", not differ),
        ("two collators, times one", two, f"at least {TWO_OF_ONE:g}", two >= TWO_OF_ONE),
    ]


def _bounds(result: dict[str, Any], workers: dict[str, Any]) -> Iterator[str]:
    yield "| it must show | worst of this run | limit | |"
    yield "|---|---|---|---|"
    for what, value, limit, holds in bounds(result, workers):
        yield f"| {what} | {value:.3g} | {limit} | {'holds' if holds else 'fails'} |"


def rendered() -> str:
    """The page with its figures renewed."""
    result, workers = (json.loads(file.read_text(encoding="utf-8")) for file in (RESULT, WORKERS))
    return pages.with_part(PAGE, START, END, figures(result, workers))


def write() -> None:
    """Renew the page."""
    PAGE.write_text(rendered(), encoding="utf-8")


def main() -> int:
    """Write the page, or say whether it is up to date."""
    return pages.command(__doc__, lambda: {PAGE: rendered()})


if __name__ == "__main__":
    raise SystemExit(main())
