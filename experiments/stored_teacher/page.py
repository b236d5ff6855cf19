"""Write the result into `docs/operations.md`: `python -m experiments.stored_teacher.page`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.stored_teacher.__main__ import METHODS, RESULT, SIZES
from xtoken_core.atomic import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN, END = "<!-- Begin: experiments.stored_teacher.page -->", "<!-- End: experiments.stored_teacher.page -->"
TITLES = {"p_kl": "P-KL", "chain": "chain"}
TEST = "bits_per_byte_handbook-de.test"
GIB = 1 << 30


def render(result: Mapping[str, Any]) -> str:
    """Return the tables.

    Args:
        result: What `experiments.stored_teacher` wrote.
    """
    machine, runs = result["machine"], result["runs"]
    gpu = ", ".join(dict.fromkeys(machine["gpus"])) or "CPU"
    lines = [
        f"Measured with SmolLM2-135M-Instruct as the student and Gemma 3 270M as the teacher, {gpu}, "
        f"torch {machine['torch']}, one data seed, learning rate {result['learning_rate']:g}, beside other programs:",
        "",
        "| loss | teacher's output | steps | loss at the end | held-out bits per byte | than whole logits |",
        "|---|---|---|---|---|---|",
        *_quality(runs),
        "",
        "| run | seconds per step | student's GPU memory, GiB | teacher's GPU memory, GiB | waiting for the store |",
        "|---|---|---|---|---|",
        *_second(runs),
    ]
    for content, build in result["builds"].items():
        lines += [
            "",
            f"The store of {_content(content)} was built in {build['seconds']:.0f} s, start-up included: "
            f"{build['records']} documents, {build['tokens']:,} tokens, {build['bytes_per_token']:.0f} bytes a token.",
        ]
    return "\n".join(lines)


def _quality(runs: Mapping[str, Any]) -> Iterator[str]:
    for method in METHODS:
        name = f"stored-{method.replace('_', '-')}"
        whole = runs.get(f"{name}-whole")
        for size in ("whole", *SIZES):
            run = runs.get(f"{name}-{size}")
            if run is None:
                continue
            bits = run["curve"][-1][TEST]
            than = "" if whole is None or run is whole else f"{bits - whole['curve'][-1][TEST]:+.4f}"
            output = "whole logits" if size == "whole" else f"{size} largest"
            yield f"| {TITLES[method]} | {output} | {run['steps']} | {run['loss']:.4f} | {bits:.4f} | {than} |"


def _second(runs: Mapping[str, Any]) -> Iterator[str]:
    for content in ("topk", "hidden"):
        for kind, title in (("living", "living teacher"), ("again", "from the store")):
            run = runs.get(f"stored-{kind}-{content}")
            if run is None:
                continue
            teacher = run.get("teacher_peak_bytes", 0) + run.get("teacher_ring_bytes", 0)
            waited = f"{run['store_wait_fraction']:.2%}" if "store_wait_fraction" in run else ""
            memory = f"{run['trainer_peak_bytes'] / GIB:.2f} | {teacher / GIB:.2f}"
            yield f"| {_content(content)}, {title} | {run['seconds_per_step']:.3f} | {memory} | {waited} |"


def _content(content: str) -> str:
    return {"topk": "64 largest logits", "hidden": "hidden states"}[content]


def written() -> str:
    """Return `docs/operations.md` as the result file asks for."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    tables = render(json.loads(RESULT.read_text(encoding="utf-8")))
    return before + BEGIN + "\n\n" + tables + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    atomic_write(PAGE, written())
