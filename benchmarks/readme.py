"""Write the figures of `README.md` from the result files of the benchmarks.

    python -m benchmarks.readme [--check]

With `--check` nothing is written: the exit status says whether the README is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "README.md"
START, END = "<!-- figures: written by benchmarks/readme.py -->", "<!-- end of figures -->"


def rendered() -> str:
    """The README as the result files want it."""
    table = ["| what | xtoken | beside it | ours over theirs | command |", "|---|---|---|---|---|", *_rows()]
    return pages.with_part(PAGE, START, END, "\n".join([START, *table, END]))


def _rows() -> Iterator[str]:
    yield _whole_run(_result("end_to_end"))
    yield from _losses(_result("ops"))
    yield _queue(_result("queue"))
    yield _alignment(_result("collate"))


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _whole_run(result: dict[str, Any]) -> str:
    """The fastest run that has a serial loop beside it whose teacher computes in the same precision."""
    compared = [
        variant
        for variant in result["variants"].values()
        if "times_serial" in variant and not variant["changes"].get("teacher", {}).get("fp8")
    ]
    best = max(compared, key=lambda variant: variant["tokens_per_second"])
    serial = result["serial"][best["serial"]]
    return (
        f"| a whole run, one {result['machine']['gpus'][0]} | {best['tokens_per_second']:,.0f} tokens/s "
        f"| serial loop of eager models: {serial['tokens_per_second']:,.0f} | {best['times_serial']:.2f} times "
        "| `make bench-e2e` |"
    )


def _losses(result: dict[str, Any]) -> Iterator[str]:
    """Whole losses, kernels beside plain PyTorch."""
    rows = {(row["op"], row["backend"]): row for row in result["rows"]}
    for op, name in (("p_kl_loss", "P-KL"), ("gold_loss", "gold")):
        ours, plain = (_both(rows[op, backend]) for backend in ("triton", "reference"))
        yield (
            f"| {name} with cross-entropy, {result['shape']['tokens']:,} tokens, one {result['gpu']} | {ours:.1f} ms "
            f"| plain PyTorch: {plain:.1f} ms | {plain / ours:.1f} times | `make bench-ops` |"
        )


def _both(row: dict[str, Any]) -> float:
    return float(row["forward_ms"] + row["backward_ms"])


def _queue(result: dict[str, Any]) -> str:
    """The lowest and the highest of put and get, ipc and tcp, one and four requests in flight."""
    pairs = [(ours, result["plain"][key]) for key, ours in result["ours"].items()]
    rates = [ours[call] for ours, _ in pairs for call in ("put", "get")]
    times = [ours[call] / plain[call] for ours, plain in pairs for call in ("put", "get")]
    return (
        f"| queue, {result['machine']['cpus']} cores | {min(rates):,.0f} to {max(rates):,.0f} samples/s "
        f"| plain pyzmq, which keeps no books | {min(times):.1f} to {max(times):.1f} times | `make bench-queue` |"
    )


def _alignment(result: dict[str, Any]) -> str:
    """The lowest and the highest of all pairs, texts and lengths, beside a walk over offsets."""
    times = [row["times_offset_walk"] for row in result["align"]]
    rates = [row["student_tokens_per_s"] / 1e6 for row in result["align"]]
    return (
        f"| alignment, one core | {min(rates):.1f} to {max(rates):.1f} million tokens/s | a walk over offsets "
        f"| {min(times):.1f} to {max(times):.1f} times | `make bench-collate` |"
    )


def main() -> int:
    """Write the page, or say whether it is up to date."""
    return pages.command(__doc__, lambda: {PAGE: rendered()})


if __name__ == "__main__":
    raise SystemExit(main())
