"""Write the whole run's figures into `docs/performance.md`, from the JSON of the benchmark.

    python -m benchmarks.end_to_end.page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "end_to_end.json"
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- end to end: written by benchmarks/end_to_end/page.py -->", "<!-- end of end to end -->"
LOSSES = {"p_kl": "P-KL", "gold": "gold", "h_kl": "H-KL"}


def figures(result: dict[str, Any]) -> str:
    """The generated part of the page."""
    return "\n".join([START, *_setting(result), "", *_rates(result), "", *_split(result), END])


def rendered() -> str:
    """The page as the result file wants it."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return before + figures(json.loads(RESULT.read_text(encoding="utf-8"))) + after


def _setting(result: dict[str, Any]) -> Iterator[str]:
    settings, machine = result["settings"], result["machine"]
    yield (
        f"{' and '.join(machine['gpus'])}, Python {machine['python']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}: {settings['samples']} documents of {settings['context']:,} tokens a step, "
        f"{settings['steps']} steps after {settings['warmup']}."
    )


def _rates(result: dict[str, Any]) -> Iterator[str]:
    yield "| | tokens/s | times the serial loop | waiting for rows | waiting for the teacher | command to first step |"
    yield "|---|---|---|---|---|---|"
    for name, serial in result["serial"].items():
        yield f"| serial loop, {_words(name)} | {serial['tokens_per_second']:,.0f} | | | | |"
    for suffix, variants in (("", result["variants"]), (", with MPS", result.get("with_mps", {}))):
        for variant in variants.values():
            yield _row(variant, suffix)


def _row(variant: dict[str, Any], suffix: str) -> str:
    label = f"xtoken, {_words(variant['serial'])}{_settings(variant)}{suffix}"
    if "failed" in variant:
        return f"| {label} | failed | | | | |"
    median = variant["median"]
    times = f"{variant['times_serial']:.2f}" if "times_serial" in variant else ""
    return (
        f"| {label} | {variant['tokens_per_second']:,.0f} | {times} | {median['data_wait']:.1%} | "
        f"{median['teacher_wait']:.1%} | {variant['command_to_first_step_s']:.0f} s |"
    )


def _words(serial: str) -> str:
    loss, _, checkpointed = serial.partition(" ")
    return LOSSES[loss] + (", activations recomputed" if checkpointed else "")


def _settings(variant: dict[str, Any]) -> str:
    changes = variant["changes"]
    parts = {
        ", compiled": changes.get("student", {}).get("compile"),
        ", hidden states": "hidden" in changes.get("workers", {}).get("signal", ""),
        ", teacher in 8 bits": changes.get("teacher", {}).get("fp8"),
        ", a step in one micro-batch": variant["wide"],
    }
    return "".join(words for words, there in parts.items() if there)


def _split(result: dict[str, Any]) -> Iterator[str]:
    yield "A step of the serial loop, ms, and its peak of memory above weights, gradients and moments:"
    yield ""
    for name, serial in result["serial"].items():
        parts = ", ".join(
            f"{part} {seconds * 1e3:.0f}" for part, seconds in serial["median"].items() if part != "seconds"
        )
        total, peak = serial["median"]["seconds"] * 1e3, serial["peak_bytes_above_state"] / 1e9
        yield f"- {_words(name)}: {total:.0f} ({parts}); {peak:.1f} GB"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = rendered()
    if parser.parse_args().check:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
