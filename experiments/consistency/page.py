"""Write `docs/consistency.md` from the results: `python -m experiments.consistency.page`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.consistency.__main__ import CE, RESULTS, SCALES, VARIANTS
from experiments.consistency.by_class import CLASSES, HEAVIEST, SAMPLE
from xtoken_core.atomic import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "consistency.md"
COLUMNS = ("all", "1:1", "1:n", "n:1", "m:n", "numerals", "line ends")
WORLDS = {
    1: "The teacher splits numerals into digits.",
    2: "As world 1; the teacher also joins a mark and the line's end behind it.",
    3: "As world 1; the teacher's tokenizer is a Unigram model.",
}
ORDER = (CE, *sorted(VARIANTS), "ALM, tau 1", "ALM, tau 100", *CLASSES)
TITLES = {
    "chain": "chain without corrections",
    "chain + conditioning": "chain + conditioning, no end terms",
    "chain + end terms + conditioning": "**chain**: end terms, conditioning",
    "chain, all corrections": "chain without the bare space",
}
"""What the table calls losses whose names in results say less; in bold the default."""
LEFT = """## Not measured yet

These were not measured: a loss that is evaluated by its own class takes minutes of processor time in every world. Rows
above with empty cells are in the list too; only losses whose expectation is exact are tried with cross-entropy."""
INTRODUCTION = Path(__file__).with_name("introduction.md")


def render(results: Path = RESULTS) -> str:
    """Return the page.

    Args:
        results: Directory of the result files.
    """
    scales = "; ".join(
        f"{name}: {words:,} words, {numerals} numerals, vocabularies of at most {student:,} and {teacher:,} tokens"
        for name, (words, numerals, student, teacher, _) in SCALES.items()
        if name != "tiny"
    )
    introduction = INTRODUCTION.read_text(encoding="utf-8")
    parts = [introduction.format(scales=scales, heaviest=HEAVIEST, sample=SAMPLE)]
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    for scale in SCALES:
        for found in sorted((each for each in files if each["scale"] == scale), key=lambda each: each["world"]):
            parts.append(_section(found))
    missing = [
        f"{scale} scale, world {world}: {'; '.join(TITLES.get(name, name) for name in left)}"
        for scale in ("full", "reduced")
        for world in WORLDS
        if (left := _missing(files, scale, world))
    ]
    if missing:
        parts.append(f"{LEFT}\n\n" + "\n".join(f"- {line}" for line in missing) + "\n")
    return "\n".join(parts)


def _missing(files: list[dict[str, Any]], scale: str, world: int) -> list[str]:
    known = next((each["losses"] for each in files if (each["scale"], each["world"]) == (scale, world)), {})
    left = [name for name in ORDER if not _is_whole(known.get(name, {}))]
    return ["every loss"] if len(left) == len(ORDER) else left


def _is_whole(entry: Mapping[str, Any]) -> bool:
    return "truth" in entry and "near" in entry


def _section(found: Mapping[str, Any]) -> str:
    chunks = ", ".join(f"{shape} {fraction:.1%}" for shape, fraction in found["chunks"].items())
    environments = [entry["environment"] for entry in found["losses"].values()]
    machines = dict.fromkeys(
        f"{of['cpu']}; Python {of['python']}, torch {of['torch']}, transformers {of['transformers']}"
        for of in environments
    )
    seconds = sum(entry["cpu_seconds"] for entry in found["losses"].values())
    tokens, states = found["tokens"], found["states"]
    lines = [
        f"## World {found['world']}, {found['scale']} scale",
        "",
        f"{WORLDS[found['world']]} {tokens[0]:,} student and {tokens[1]:,} teacher tokens, {found['common']:,} common;",
        f"{states[0]:,} and {states[1]:,} states; {found['events']:,} distinct chunks: {chunks}.",
        f"{found['steps']} steps of descent, seed {found['seed']}, {seconds:,.0f} CPU seconds on one thread of",
        "\nand ".join(machines) + ".",
        "",
        "| loss | " + " | ".join(COLUMNS) + " | best | final | with cross-entropy: best | final |",
        "|---" * (len(COLUMNS) + 5) + "|",
    ]
    for name in ORDER:
        if {"truth", "near"} & found["losses"].get(name, {}).keys():
            lines.append(_row(name, found["losses"][name]))
    return "\n".join([*lines, ""])


def _row(name: str, entry: Mapping[str, Any]) -> str:
    truth, near = entry.get("truth", {}), entry.get("near", {})
    cells = [f"{truth[column]['relative_gradient']:.3f}" if column in truth else "" for column in COLUMNS]
    cells += [f"{near[key]:.4f}" if near else "" for key in ("best", "final")]
    with_ce = entry.get("near, cross-entropy .1")
    cells += [f"{with_ce[key]:.4f}" for key in ("best", "final")] if with_ce else ["", ""]
    return f"| {TITLES.get(name, name)} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    atomic_write(PAGE, render())
