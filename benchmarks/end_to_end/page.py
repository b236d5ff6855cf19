"""Write the whole run's figures into `docs/performance.md`, from the benchmark's result files.

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
FILES = {
    "end_to_end": "one GPU",
    "end_to_end_mps": "NVIDIA's MPS",
    "end_to_end_two_gpus": "two GPUs",
}
"""The result files, each of one machine, and what it is about."""
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- end to end: written by benchmarks/end_to_end/page.py -->", "<!-- end of end to end -->"
LOSSES = {"p_kl": "P-KL", "gold": "gold", "h_kl": "H-KL"}
GB = 1e9
PARTS = {
    "forward_seconds": "forward",
    "loss_seconds": "loss",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimiser",
}
"""Of a trainer's step, where its records have them."""


def results() -> dict[str, dict[str, Any]]:
    """Every result file that is there."""
    files = {name: RESULTS / f"{name}.json" for name in FILES}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def figures(found: dict[str, dict[str, Any]]) -> str:
    """The generated part of the page."""
    parts = [list(_bounds(found))]
    for name, result in found.items():
        parts += [[_setting(FILES[name], result)], list(_calls(result)), list(_rates(result))]
        for title, lines in (("the serial loops", _loop_steps(result)), ("xtoken's trainer", _trainer_steps(result))):
            if steps := list(lines):
                parts += [[f"A step of {title}, ms:"], steps]
    return f"{START}\n" + "\n\n".join("\n".join(part) for part in parts) + f"\n{END}"


def rendered() -> str:
    """The page as the result files want it."""
    return pages.with_part(PAGE, START, END, figures(results()))


def _bounds(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| it must show | this run | must | aim | |"
    yield "|---|---|---|---|---|"
    for bound in bounds_of(found):
        yield f"| {bound.what} | {bound.told} | {bound.must_told} | {bound.aim_told} | {bound.verdict} |"


def _setting(about: str, result: dict[str, Any]) -> str:
    settings, machine = result["calls"][0], result["machine"]
    sizes = result["vocabularies"]
    shared = f"vocabularies of {sizes['student']:,} and {sizes['teacher']:,} tokens share {sizes['shared']:,}"
    return (
        f"About {about}, on {' and '.join(machine['gpus'])}, Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}: {settings['samples']} documents of {settings['context']:,} tokens a "
        f"step, {settings['steps']} steps after {settings['warmup']}; {shared}. All rows were measured on this one "
        f"machine, one after the other, in {_counted(len(result['calls']), 'call')}:"
    )


def _calls(result: dict[str, Any]) -> Iterator[str]:
    """What each call was asked for, and what else the machine did."""
    for number, call in enumerate(result["calls"], 1):
        words = ["--variants", *call["variants"]] if call["variants"] else []
        words += [f"--{name.replace('_', '-')}" for name in ("public_loss", "no_serial") if call.get(name)]
        asked = f"`{' '.join(words)}`" if words else "serial loops only"
        trl = f" (TRL {call['trl']})" if call.get("trl") else ""
        also = f"; meanwhile {call['also']}" if call.get("also") else ""
        yield f"{number}. {asked}{trl}{also}."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


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
    label = _label(variant)
    kept = _activations(variant["serial"])
    if "failed" in variant:
        return f"| {label} | bfloat16 | {kept} | failed | | | | | | |"
    median = variant["median"]
    times = f"{variant['times_serial']:.2f}" if "times_serial" in variant else ""
    beside = ""
    if "times_beside" in variant:
        other = result["variants"][variant["beside"]]
        beside = f"{variant['times_beside']:.2f} ({_label(other)})"
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


def _label(variant: dict[str, Any]) -> str:
    return f"{_words(variant['serial'])}{_settings(variant)}"


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


def _loop_steps(result: dict[str, Any]) -> Iterator[str]:
    for name, serial in result["serial"].items():
        parts = {part: seconds for part, seconds in serial["median"].items() if part != "seconds"}
        yield _step(f"{_words(name)}, activations {_activations(name)}", serial["median"]["seconds"], parts)


def _trainer_steps(result: dict[str, Any]) -> Iterator[str]:
    """Of the variants whose trainer has told its parts."""
    for variant in result["variants"].values():
        median = variant.get("median", {})
        parts = {words: median[name] for name, words in PARTS.items() if name in median}
        if parts:
            yield _step(f"{_label(variant)}, activations {_activations(variant['serial'])}", median["seconds"], parts)


def _step(what: str, whole: float, parts: dict[str, float]) -> str:
    return f"- {what}: {whole * 1e3:.0f} ({', '.join(f'{part} {s * 1e3:.0f}' for part, s in parts.items())})"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    return pages.command(__doc__, lambda: {PAGE: rendered()})


if __name__ == "__main__":
    raise SystemExit(main())
