"""Writes the measured figures into the operators' pages, from the JSON of the tests and of the benchmark.

    python -m benchmarks.operator_pages [--check]

With `--check` nothing is written: the exit status says whether the pages are up to date.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import pages
from benchmarks.gpu_tests import RESULTS, ROOT, belongs_to
from benchmarks.whole_losses import OPS_OF
from xtoken_core.ops.registry import BACKENDS

PAGES = ROOT / "docs" / "operators"
OPS_JSON = ROOT / "benchmarks" / "results" / "ops.json"
HIDDEN = "hidden_states"
HIDDEN_JSON = ROOT / "benchmarks" / "results" / "hidden_states.json"
HIDDEN_TESTS = "test_losses_from_hidden_states"
START = "<!-- measured: written by benchmarks/operator_pages.py -->"
PAGE_OF = {"p_kl_cross_entropy": "p_kl"}
"""Ops that share another's page."""


def figures(page: str, tests: dict, bench: dict) -> str:
    """The measured section of a page."""
    ops = [op for op in BACKENDS if PAGE_OF.get(op, op) == page]
    losses = [name for name, used in OPS_OF.items() if used[0] == page]
    rows = [
        row
        for row in bench["rows"]
        if row["op"] in losses or any(row["op"] in (op, f"{op}_full_vocabulary") for op in ops)
    ]
    own = [
        outcome
        for name, outcome in tests["tests"].items()
        if any(belongs_to(name, op, backend) for op in ops for backend in BACKENDS[op])
    ]
    versions = f"{tests['gpu']}, torch {tests['torch']}, Triton {tests['triton']}, CUDA {tests['cuda']}"
    lines = [START, "## Measured", ""]
    lines += [f"Contract tests on one {versions}: {own.count('passed')} passed, {own.count('failed')} failed.", ""]
    if rows:
        s = bench["shape"]
        lines += [
            f"Forward, then backward, in ms, on one {bench['gpu']}; memory above the inputs; share of a copy's "
            f"{bench['copy_bytes_per_second'] / 1e12:.2f} TB/s for the bytes that must move.",
            f"{s['tokens']:,} tokens, vocabularies {s['student_vocab']:,} and {s['teacher_vocab']:,}, bfloat16, "
            f"`vocab_topk` {s['vocab_topk']:,}; experts: {s['moe_tokens']:,} tokens, top 8 of 128; embedding: "
            f"{s['embedding_ids']:,} ids, {s['embedding_width']:,} wide.",
            "",
            "| op | backend | forward | backward | peak GiB | share of a copy |",
            "|---|---|---|---|---|---|",
        ]
        lines += [table_row(row) for row in rows]
    else:
        lines += ["No times of its own."]
    return "\n".join(lines) + "\n"


def hidden_state_figures(tests: dict, bench: dict) -> str:
    """The measured section of the page on losses from hidden states."""
    own = [outcome for name, outcome in tests["tests"].items() if name.startswith(HIDDEN_TESTS)]
    s = bench["shape"]
    lines = [
        f"{START}\n## Measured\n",
        f"Tests on one {tests['gpu']}: {own.count('passed')} passed, {own.count('failed')} failed.\n",
        f"Loss and all gradients in ms on one {bench['gpu']}, torch {bench['torch']}, Triton {bench['triton']}; beside "
        "it, in the same run, the matrix products that any such loss needs, each as one product over all tokens (the "
        "student's logits, its two gradients, the teacher's logits), and those that the loss itself makes (with column "
        "maxima the teacher's at the compared tokens only). Memory above hidden states, weights and batch, gradients "
        "included.",
        f"{s['samples'] * s['tokens']:,} tokens (samples of {s['tokens']:,}, or one), widths {s['student_width']:,} "
        f"and {s['teacher_width']:,}, vocabularies {s['student_vocab']:,} and {s['teacher_vocab']:,}, bfloat16, "
        f"`vocab_topk` {s['vocab_topk']:,}.\n",
        "| loss | ms | products | times | own products | times | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in bench["rows"]:
        if row["tests_pass"]:
            lines.append(
                f"| {row['loss']} | {row['ms']:.1f} | {row['products_ms']:.1f} | {row['ratio']:.2f} | "
                f"{row['own_products_ms']:.1f} | {row['own_ratio']:.2f} | {row['peak_bytes'] / 2**30:.2f} |"
            )
        else:
            lines.append(f"| {row['loss']} | its tests have not passed | | | | | |")
    return "\n".join(lines) + "\n"


def table_row(row: dict) -> str:
    """One backend's figures."""
    if not row["tests_pass"]:
        return f"| {row['op']} | {row['backend']} | its tests have not passed | | | |"
    backward = max(row["backward_ms"], 0.0)
    return (
        f"| {row['op']} | {row['backend']} | {row['forward_ms']:.3f} | {backward:.3f} | "
        f"{row['peak_bytes'] / 2**30:.2f} | {row['share_of_copy']:.0%} |"
    )


def rendered(path: Path, tests: dict, bench: dict) -> str:
    """A page with its measured section renewed."""
    text, _, _ = path.read_text(encoding="utf-8").partition(START)
    if path.stem == HIDDEN:
        measured = hidden_state_figures(tests, json.loads(HIDDEN_JSON.read_text()))
    else:
        measured = figures(path.stem, tests, bench)
    return text.rstrip() + "\n\n" + measured


def _all() -> dict[Path, str]:
    tests, bench = json.loads(RESULTS.read_text()), json.loads(OPS_JSON.read_text())
    return {path: rendered(path, tests, bench) for path in sorted(PAGES.glob("*.md")) if path.stem != "README"}


def main() -> int:
    """Write the pages, or say whether they are up to date."""
    return pages.command(__doc__, _all)


if __name__ == "__main__":
    raise SystemExit(main())
