"""Write `docs/evidence.md`, `docs/evidence-all.md` and their pictures from result files, predictions and templates.

    python -m experiments.real.page [--check]

With `--check` nothing is written; the exit status is 1 if a file is out of date.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.pages import render, write
from experiments.real import adaptive, methods, overview, predictions, speed, summary

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "real.json"
PAGES = {"page.md.j2": ROOT / "docs" / "evidence.md", "all_figures.md.j2": ROOT / "docs" / "evidence-all.md"}
PICTURES = [ROOT / "docs" / "img" / f"evidence-{name}.svg" for name in ("strong", "real")]


def rendered() -> dict[Path, str]:
    """Return every generated file with its text."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    found = values(result)
    pages = {page: render(Path(__file__).parent / template, **found) for template, page in PAGES.items()}
    drawn = adaptive.picture(found["adaptive"]), overview.picture(result)
    return pages | dict(zip(PICTURES, drawn, strict=True))


def values(result: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the templates show.

    Args:
        result: Content of the result file.
    """
    conditions = [_entry(result, name) for name in result["conditions"] if summary.table(result, name)]
    compared = [entry for entry in conditions if {"chain", "ce"} <= set(entry["chosen"])]
    text = [entry for entry in compared if not entry.get("tasks")]
    verdicts = Counter(row.rsplit("|", 2)[1].strip() for row in predictions.compare(result))
    return {
        "machine": result["machine"],
        "overview": overview.table(result),
        "chain": overview.compared(result),
        "transfers": sum(_transfers(entry["chosen"], f"{entry['others'][0]}.test") for entry in text),
        "compared": len(text),
        "judged": verdicts["as predicted"] + verdicts["**not**"],
        "missed": verdicts["**not**"],
        "runs": len(result["runs"]),
        "speed": _speed(),
        "adaptive": adaptive.section(),
    }


def _speed() -> dict[str, Any]:
    """Return the measured steps and their rows as the template shows them."""
    result = json.loads(speed.RESULT.read_text(encoding="utf-8"))
    return {**result, "rows": speed.shown(result), "spread": speed.forward_spread(result)}


def _entry(result: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a condition with the rows of its methods at their chosen weights."""
    best = summary.chosen(summary.as_shipped(summary.outcomes(result)), methods.SEEDS[0])
    rows = [row for row in summary.table(result, name) if best.get((name, row.method)) == row.weight]
    return {**result["conditions"][name], "name": name, "chosen": {row.method: row for row in rows}}


def _transfers(chosen: dict[str, summary.Row], text: str) -> bool:
    return chosen["chain"].others[text] < chosen["ce"].others[text]


if __name__ == "__main__":
    raise SystemExit(write(rendered, __doc__))
