"""Writes the measured figures into the operators' pages, from the JSON of the tests and of the benchmark.

    python -m benchmarks.operator_pages [--check]

With `--check` nothing is written: the exit status says whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.gpu_tests import RESULTS, ROOT, belongs_to
from xtoken_core.ops.registry import BACKENDS

PAGES = ROOT / "docs" / "operators"
OPS_JSON = ROOT / "benchmarks" / "results" / "ops.json"
START = "<!-- measured: written by benchmarks/operator_pages.py -->"
PAGE_OF = {"p_kl_cross_entropy": "p_kl"}
"""Ops that share another's page."""


def figures(page: str, tests: dict, bench: dict) -> str:
    """The measured section of a page."""
    ops = [op for op in BACKENDS if PAGE_OF.get(op, op) == page]
    rows = [row for row in bench["rows"] if any(row["op"] in (op, f"{op}_full_vocabulary") for op in ops)]
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
    return text.rstrip() + "\n\n" + figures(path.stem, tests, bench)


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say whether the pages are up to date")
    check = parser.parse_args().check
    tests, bench = json.loads(RESULTS.read_text()), json.loads(OPS_JSON.read_text())
    stale = []
    for path in sorted(PAGES.glob("*.md")):
        if path.stem == "README":
            continue
        text = rendered(path, tests, bench)
        if text != path.read_text(encoding="utf-8"):
            stale.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
