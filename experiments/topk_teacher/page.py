"""Write the errors of largest logits into `docs/losses.md`: `python -m experiments.topk_teacher.page`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
RESULT = Path(__file__).with_name("results") / "topk_teacher.json"
OTHERS = [RESULT.with_name(f"topk_teacher_{name}.json") for name in ("gpu", "trained")]
"""Further results: of more text on a GPU, and of a student that was trained before; not all need be there."""
BEGIN, END = "<!-- Begin: experiments.topk_teacher.page -->", "<!-- End: experiments.topk_teacher.page -->"
TITLES = {"p_kl": "P-KL", "alm": "ALM", "chain": "chain"}
RATIOS = ("value_ratio", "cosine", "norm_ratio")
PARTS = ("start_ratio", "inner_ratio", "end_ratio")


def render(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables.

    Args:
        results: What `experiments.topk_teacher` wrote, at several times.
    """
    lines = [
        "Value, norm, and chain's start, inner and end parts are ratios to those of whole logits; cosine and norm are "
        "those of the gradient of the student's last hidden states."
    ]
    for result in results:
        steps = result.get("steps")
        when = f"After {steps} steps of chain from whole logits" if steps else "Before any training"
        lines += ["", f"{when}: {_setting(result)}.", "", *_table(result)]
    return "\n".join(lines)


def _setting(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    device = machine["gpus"][0] if result.get("device") == "cuda" else "a CPU"
    return (
        f"teacher Gemma 3 270M, student SmolLM2-135M-Instruct, {result['documents']} documents of {result['text']} cut "
        f"to {result['context_length']} tokens, {device} (torch {machine['torch']})"
    )


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| loss | whole value | variant | value | cosine | norm | start | inner | end | `chunk_mass_t0` |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for mode, measured in result["modes"].items():
        for name, row in measured["variants"].items():
            mass = f"{row['mass']:.3f}" if mode == "chain" else ""
            ratios = " | ".join(f"{row[column]:.4f}" for column in RATIOS)
            parts = " | ".join(f"{row[column]:.4f}" if column in row else "" for column in PARTS)
            yield f"| {TITLES[mode]} | {measured['value']:.4f} | {name} | {ratios} | {parts} | {mass} |"


def written() -> str:
    """Return `docs/losses.md` as the result files ask for."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    results = [json.loads(file.read_text(encoding="utf-8")) for file in (RESULT, *OTHERS) if file.exists()]
    return before + BEGIN + "\n\n" + render(results) + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    atomic_write(PAGE, written())
