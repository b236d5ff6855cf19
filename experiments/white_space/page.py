"""Write the tables of masks on white space into `docs/losses.md`: `python -m experiments.white_space.page`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from experiments.vocabularies.page import PAGE, insert
from experiments.white_space.__main__ import CLASSES, RESULT, VARIANTS
from xtoken_core.atomic import atomic_write

TITLES = {
    "before training": "before training",
    "cross-entropy": "cross-entropy only",
    "chain": "chain",
    "chain-no-line-ends": "chain, line ends masked",
    "chain-no-white-space": "chain, white space masked",
}
SOURCES = {"python-code": "Python", "handbook-de": "German"}


def render(result: Mapping[str, Any] | None, gradients: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables.

    Args:
        result: What `experiments.white_space` wrote; None: nothing has been trained.
        gradients: By source, what `xtoken gradients` wrote.
    """
    lines = [] if result is None else [*_trained(result), ""]
    lines += [
        "| text | class | chunks | nats | gradient's norm to cross-entropy's | cosine with cross-entropy |",
        "|---" * 6 + "|",
    ]
    for source, measured in gradients.items():
        for name, entry in measured["classes"].items():
            if name != "cross_entropy":
                cosine = measured["cosine"]["cross_entropy"][name]
                lines.append(
                    f"| {SOURCES[source]} | {name.removesuffix('_t0').replace('to', ':')} | {entry['count']:,} | "
                    f"{entry['value']:.3f} | {entry['norm_ratio']:.2f} | {cosine:.2f} |"
                )
    return "\n".join(lines)


def _trained(result: Mapping[str, Any]) -> list[str]:
    records = [record for record in result["records"] if "classes" in record]
    lines = [
        f"{result['steps']} steps of 16 Python documents, cross-entropy of weight 0.1 beside chain; "
        f"{result['documents']} held-out documents; {', '.join(result['machine']['gpus']) or 'CPU'}.",
        "Nats per token of a class, and the fraction of its tokens to which the student gives the highest probability.",
        "",
        "| trained with | data seeds | bits per byte | "
        + " | ".join(f"{name}: nats | right" for name in CLASSES)
        + " |",
        "|---" * (3 + 2 * len(CLASSES)) + "|",
    ]
    for name in ("before training", *VARIANTS):
        own = [record for record in records if record["variant"] == name]
        if own:
            seeds = ", ".join(str(record["seed"]) for record in own if "seed" in record)
            bits = mean(each["bits_per_byte"] for each in own)
            lines.append(f"| {TITLES[name]} | {seeds} | {bits:.4f} | {_cells(own)} |")
    return [*lines, *_early(result["records"])]


def _early(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the last step that every run has reached: some were stopped early."""
    curves = {(record["variant"], record["seed"]): record["curve"] for record in records if "curve" in record}
    common = set.intersection(*(set(map(int, curve)) for curve in curves.values())) if curves else set()
    if not common or max(common) == 0:
        return []
    step, seeds = str(max(common)), sorted({seed for _, seed in curves})
    lines = [
        "",
        f"Bits per byte on validation after {step} steps, which every run has reached:",
        "",
        "| trained with | " + " | ".join(f"data seed {seed}" for seed in seeds) + " |",
        "|---" * (1 + len(seeds)) + "|",
    ]
    for name in VARIANTS:
        cells = [f"{curves[name, seed][step]:.4f}" if (name, seed) in curves else "" for seed in seeds]
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} |")
    return lines


def _cells(records: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for name in CLASSES:
        entries = [record["classes"][name] for record in records]
        cells += [f"{mean(each['nats'] for each in entries):.3f}", f"{mean(each['accuracy'] for each in entries):.1%}"]
    return " | ".join(cells)


def written() -> str:
    """Return `docs/losses.md` as the result files ask for."""
    files = {source: RESULT.with_name(f"gradients-{source}.json") for source in SOURCES}
    gradients = {
        source: json.loads(file.read_text(encoding="utf-8")) for source, file in files.items() if file.exists()
    }
    tables = render(json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else None, gradients)
    return insert(PAGE.read_text(encoding="utf-8"), tables, "experiments.white_space.page")


if __name__ == "__main__":
    atomic_write(PAGE, written())
