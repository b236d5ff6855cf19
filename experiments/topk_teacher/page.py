"""Write the errors of largest logits into `docs/losses.md`: `python -m experiments.topk_teacher.page`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
RESULT = Path(__file__).with_name("results") / "topk_teacher.json"
BEGIN, END = "<!-- Begin: experiments.topk_teacher.page -->", "<!-- End: experiments.topk_teacher.page -->"
TITLES = {"p_kl": "P-KL", "alm": "ALM", "chain": "chain"}


def render(result: Mapping[str, Any]) -> str:
    """Return the table.

    Args:
        result: What `experiments.topk_teacher` wrote.
    """
    lines = [
        f"Measured before any training: teacher {result['teacher']}, student {result['student']}, "
        f"{result['documents']} documents of {result['text']} cut to {result['context_length']} tokens, on a CPU "
        f"(torch {result['machine']['torch']}). Value and norm are ratios to those of whole logits; cosine and "
        "norm are those of the gradient of the student's last hidden states.",
        "",
        "| loss | whole value | variant | value | cosine | norm | `chunk_mass_t0` |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, measured in result["modes"].items():
        for name, row in measured["variants"].items():
            mass = f"{row['mass']:.3f}" if mode == "chain" else ""
            ratios = " | ".join(f"{row[column]:.4f}" for column in ("value_ratio", "cosine", "norm_ratio"))
            lines.append(f"| {TITLES[mode]} | {measured['value']:.4f} | {name} | {ratios} | {mass} |")
    return "\n".join(lines)


def written() -> str:
    """Return `docs/losses.md` as the result file asks for."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table = render(json.loads(RESULT.read_text(encoding="utf-8")))
    return before + BEGIN + "\n\n" + table + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    atomic_write(PAGE, written())
