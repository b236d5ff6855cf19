"""Write the tables of real vocabularies into `docs/losses.md`: `python -m experiments.vocabularies.page`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.vocabularies.chunks import CLASSES
from xtoken_core.atomic import atomic_write
from xtoken_core.chain.report import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
RESULT = Path(__file__).with_name("results") / "vocabularies.json"
MANY_CORES = RESULT.with_name("vocabularies-16-cores.json")
"""The same on another machine; its texts are not shown."""


def render(result: Mapping[str, Any], many_cores: Mapping[str, Any]) -> str:
    """Return the tables.

    Args:
        result: What `experiments.vocabularies` wrote.
        many_cores: Likewise, of `MANY_CORES`.
    """
    of = result["environment"]
    lines = [
        f"Measured on {of['cores']} cores of {of['cpu']}, shared with other work; tokenizers {of['tokenizers']}.",
        "The first of a pair is the student.",
        "",
        "| pair | tokens | common | without a root | CPU seconds | peak memory | file |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, pair in result["pairs"].items():
        sizes = " / ".join(f"{size:,}" for size in pair["vocabularies"])
        rootless = " / ".join(map(str, pair["without_root"]))
        lines.append(
            f"| {name} | {sizes} | {pair['common']:,} | {rootless} | {pair['cpu_seconds']} | {pair['peak_gib']} GiB | "
            f"{pair['file_mib']} MiB |"
        )
    lines += ["", *_times(many_cores)]
    lines += ["", "| pair | text | tokens met | with a root | " + " | ".join(SHAPES) + " | starts whose roots differ |"]
    lines.append("|---" * (5 + len(SHAPES)) + "|")
    for name, pair in result["pairs"].items():
        for kind, text in pair["texts"].items():
            total: Counter[str] = Counter()
            for counts in text["classes"].values():
                total.update(counts)
            met = sum(text["tokens"])
            cells = [f"{total[column] / total['chunks']:.1%}" for column in (*SHAPES, "roots differ")]
            lines.append(
                f"| {name} | {kind} | {met:,} | {1 - sum(text['rootless']) / met:.2%} | " + " | ".join(cells) + " |"
            )
    lines += ["", "Starts whose first tokens have different roots, by what the chunk spells (differing / all):", ""]
    lines += ["| pair | text | " + " | ".join(CLASSES) + " |", "|---" * (2 + len(CLASSES)) + "|"]
    for name, pair in result["pairs"].items():
        for kind, text in pair["texts"].items():
            cells = [_differing(text["classes"].get(cls)) for cls in CLASSES]
            lines.append(f"| {name} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _times(result: Mapping[str, Any]) -> list[str]:
    of = result["environment"]
    lines = [
        f"On {of['cores']} cores of {of['cpu']}, tokenizers {of['tokenizers']}; memory of the whole process,",
        "and what it had with both tokenizers loaded, before the tables:",
        "",
        "| pair | seconds | CPU seconds | peak memory | before |",
        "|---|---|---|---|---|",
    ]
    for name, pair in result["pairs"].items():
        cells = pair["seconds"], pair["cpu_seconds"], f"{pair['peak_gib']} GiB", f"{pair['peak_gib_before']} GiB"
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return lines


def _differing(counts: Mapping[str, int] | None) -> str:
    return "" if counts is None else f"{counts.get('roots differ', 0):,} / {counts['chunks']:,}"


def insert(page: str, tables: str, module: str) -> str:
    """Return a page with the tables between the two marks of the module that makes them."""
    begin, end = (f"<!-- {mark}: {module} -->" for mark in ("Begin", "End"))
    before, _, rest = page.partition(begin)
    return before + begin + "\n\n" + tables + "\n\n" + end + rest.partition(end)[2]


def written() -> str:
    """Return `docs/losses.md` as the result file asks for."""
    tables = render(*(json.loads(path.read_text(encoding="utf-8")) for path in (RESULT, MANY_CORES)))
    return insert(PAGE.read_text(encoding="utf-8"), tables, "experiments.vocabularies.page")


if __name__ == "__main__":
    atomic_write(PAGE, written())
