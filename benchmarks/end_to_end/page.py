"""Write the whole run's figures into `docs/performance.md`, from the JSON of the benchmark's calls.

    python -m benchmarks.end_to_end.page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.end_to_end.bounds import bounds_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "end_to_end.json"
CALLS = {
    "end_to_end": "one GPU",
    "end_to_end_mps": "NVIDIA's MPS",
    "end_to_end_two_gpus": "two GPUs",
}
"""The result files, each of one call, and what it is about."""
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- end to end: written by benchmarks/end_to_end/page.py -->", "<!-- end of end to end -->"
LOSSES = {"p_kl": "P-KL", "gold": "gold", "h_kl": "H-KL"}
GB = 1e9


def calls() -> dict[str, dict[str, Any]]:
    """Every call whose result file is there."""
    files = {name: RESULTS / f"{name}.json" for name in CALLS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def figures(found: dict[str, dict[str, Any]]) -> str:
    """The generated part of the page."""
    lines = [START, *_bounds(found), ""]
    for name, result in found.items():
        lines += [*_setting(CALLS[name], result), "", *_rates(result), ""]
    return "\n".join([*lines, *_split(found), END])


def rendered() -> str:
    """The page as the result files want it."""
    return pages.with_part(PAGE, START, END, figures(calls()))


def _bounds(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| it must show | this run | must | aim | |"
    yield "|---|---|---|---|---|"
    for bound in bounds_of(found):
        yield f"| {bound.what} | {bound.told} | {bound.must_told} | {bound.aim_told} | {bound.verdict} |"


def _setting(about: str, result: dict[str, Any]) -> Iterator[str]:
    settings, machine = result["settings"], result["machine"]
    sizes = result["vocabularies"]
    shared = f"vocabularies of {sizes['student']:,} and {sizes['teacher']:,} tokens share {sizes['shared']:,}"
    also = f" Meanwhile {settings['also']}." if settings.get("also") else ""
    yield (
        f"One call about {about}, on {' and '.join(machine['gpus'])}, Python {machine['python']}, torch "
        f"{machine['torch']}, transformers {machine['transformers']}: {settings['samples']} documents of "
        f"{settings['context']:,} tokens a step, {settings['steps']} steps after {settings['warmup']}; {shared}.{also}"
    )


def _rates(result: dict[str, Any]) -> Iterator[str]:
    yield (
        "| | moments | activations | tokens/s | times the serial loop | times another row | waits for rows | waits for "
        "the teacher | GB above state | first step after |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, serial in result["serial"].items():
        kept, rate, peak = _activations(name), serial["tokens_per_second"], serial["peak_bytes_above_state"] / GB
        yield f"| serial loop, {_words(name)} | bfloat16 | {kept} | {rate:,.0f} | | | | | {peak:.1f} | |"
    for variant in result["variants"].values():
        yield _row(variant, result)


def _row(variant: dict[str, Any], result: dict[str, Any]) -> str:
    label = f"{_words(variant['serial'])}{_settings(variant)}"
    kept = _activations(variant["serial"])
    if "failed" in variant:
        return f"| {label} | bfloat16 | {kept} | failed | | | | | | |"
    median = variant["median"]
    times = f"{variant['times_serial']:.2f}" if "times_serial" in variant else ""
    beside = ""
    if "times_beside" in variant:
        other = result["variants"][variant["beside"]]
        beside = f"{variant['times_beside']:.2f} ({_words(other['serial'])}{_settings(other)})"
    memory = above_state(variant)
    return (
        f"| {label} | bfloat16 | {kept} | {variant['tokens_per_second']:,.0f} | {times} | {beside} | "
        f"{median['data_wait']:.1%} | {median['teacher_wait']:.1%} | {f'{memory / GB:.1f}' if memory else ''} | "
        f"{variant['command_to_first_step_s']:.0f} s |"
    )


def above_state(variant: dict[str, Any]) -> int | None:
    """What a GPU's processes have taken beyond weights, gradients and moments; None where it was not measured."""
    parts = ("peak_bytes_above_state", "teacher_bytes_above_weights", "ring_bytes")
    return sum(variant[part] for part in parts) if all(part in variant for part in parts) else None


def _words(serial: str) -> str:
    loss, _, kind = serial.partition(" ")
    return LOSSES[loss] + (" by TRL's GOLD loss" if kind == "public" else "")


def _activations(serial: str) -> str:
    return "recomputed" if serial.endswith(" checkpointed") else "kept"


def _settings(variant: dict[str, Any]) -> str:
    changes = variant["changes"]
    student, teacher, workers, train = (changes.get(part, {}) for part in ("student", "teacher", "workers", "train"))
    parts = {
        ", not compiled": not student.get("compile"),
        ", hidden states": "hidden" in workers.get("signal", ""),
        ", teacher in 8 bits": teacher.get("fp8"),
        ", four samples together": variant["wide"],
        ", teacher on the other GPU": teacher.get("gpu") is not None,
        ", student shared by two GPUs": workers.get("ranks", 1) > 1,
        ", its gathered weights kept, gradients added up in bfloat16": not train.get("reshard_after_forward", True),
        ", MPS": variant.get("mps"),
    }
    return "".join(words for words, there in parts.items() if there)


def _split(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "A step of the serial loops, ms:"
    yield ""
    for result in found.values():
        for name, serial in result["serial"].items():
            parts = ", ".join(
                f"{part} {seconds * 1e3:.0f}" for part, seconds in serial["median"].items() if part != "seconds"
            )
            whole = f"{serial['median']['seconds'] * 1e3:.0f} ({parts})"
            yield f"- {_words(name)}, activations {_activations(name)}: {whole}"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    return pages.command(__doc__, lambda: {PAGE: rendered()})


if __name__ == "__main__":
    raise SystemExit(main())
