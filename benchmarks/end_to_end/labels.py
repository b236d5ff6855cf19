"""Labels of the rows of a whole run's result files.

Acceptance bounds of whole runs, with their aims, from the result files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bounds import Bound

RESULTS = Path(__file__).parents[1] / "results"
SUBJECTS = {
    "end_to_end": "one GPU",
    "end_to_end_chain": "chain",
    "end_to_end_lengths": "documents of different lengths",
    "end_to_end_small": "small models",
    "end_to_end_mps": "NVIDIA's MPS",
    "end_to_end_two_gpus": "two GPUs",
}
FILES = {name: subject for name, subject in SUBJECTS.items() if (RESULTS / f"{name}.json").exists()}
"""The result files that there are, each of one machine, and its subject."""
LOSSES = {"p_kl": "P-KL", "gold": "gold", "h_kl": "H-KL", "chain": "chain"}
STEP_PARTS = ("seconds", "forward_seconds", "loss_seconds", "backward_seconds", "optimizer_seconds")
"""Fields of a trainer's step record: the whole and its parts."""
Results = dict[str, dict[str, Any]]
FSDP2_VARIANTS = ("two_ranks", "two_ranks_kept", "two_ranks_mps")
TOKENS, TIMES = "{:,.0f}", "{:.2f}"


def loss_of(serial: str) -> str:
    """Return the loss of a serial loop by the loop's key, such as `gold public`."""
    loss, _, kind = serial.partition(" ")
    return LOSSES[loss] + {"public": " of TRL", "checkpointed": ", recomputed"}.get(kind, "")


def label_of(variant: dict[str, Any]) -> str:
    """Return the loss of a variant and its settings, in the words that docs/performance.md explains."""
    changes = variant["changes"]
    student, teacher, workers, train = (changes.get(part, {}) for part in ("student", "teacher", "workers", "train"))
    parts = {
        ", not compiled": not student.get("compile"),
        ", hidden": "hidden" in (workers.get("signal", "") + teacher.get("content", "")),
        ", 8-bit teacher": teacher.get("fp8") or teacher.get("quantized"),
        ", wide": variant["wide"],
        ", teacher apart": teacher.get("gpu") is not None,
        ", FSDP2": workers.get("ranks", 1) > 1,
        ", weights kept": not train.get("reshard_after_forward", True),
        ", MPS": variant.get("mps"),
        f", {variant.get('lengths')} lengths": variant.get("lengths"),
        ", padded": train.get("packing") == "off",
    }
    return loss_of(variant["serial"]) + "".join(words for words, applies in parts.items() if applies)


def conditions_of(result: dict[str, Any]) -> str:
    """Return the other work of the machine, and whether all rows are of one machine."""
    calls = result["calls"]
    machines = len({call.get("digest", result["machine"].get("digest")) for call in calls})
    words = [f" Rows are of {machines} machines."] if machines > 1 else []
    for also in dict.fromkeys(call["also"] for call in calls if call.get("also")):
        beside = [label_of(result["variants"][v]) for c in calls if c.get("also") == also for v in c["variants"]]
        words.append(
            f" Meanwhile{'' if len(beside) == len(result['variants']) else ' (' + '; '.join(beside) + ')'} {also}."
        )
    return "".join(words)


def bytes_above_state(variant: dict[str, Any]) -> int | None:
    """Return the bytes that a GPU's processes took beyond weights, gradients and moments; None if not measured."""
    parts = ("peak_bytes_above_state", "teacher_bytes_above_weights", "ring_bytes")
    return sum(variant[part] for part in parts) if all(part in variant for part in parts) else None


def step_parts(variant: dict[str, Any]) -> str:
    """Return a trainer's step in ms and its parts; empty if they were not recorded."""
    median = variant.get("median", {})
    return ", ".join(f"{1e3 * median[name]:.0f}" for name in STEP_PARTS) if STEP_PARTS[1] in median else ""


def bounds_of(results: Results) -> Iterator[Bound]:
    """Yield every bound with its figure from the first result file that has it."""
    yield from _rates(results)
    difference = _figure(results, "p_kl_fp8_wide", "loss_difference")
    mean = difference["mean"] if difference else None
    yield Bound("loss, 8-bit teacher: mean difference from bfloat16", mean, form="{:.4f}", most=True)
    yield Bound("waits: fraction of a step, worst wide row", _wait(results), 0.02, 0.005, "{:.2%}", most=True)
    for name, words in (("p_kl_hidden", "kept"), ("p_kl_hidden_checkpointed", "recomputed")):
        what = f"GB above state, P-KL, hidden, {words}: of the serial loop"
        yield Bound(what, _memory(results, name), 0.5, 0.25, "{:.0%}", most=True)
    yield from _two_gpus(results)
    for name, least, aim in (("text", 1.4, 1.6), ("chat", 1.6, 1.8)):
        yield from _lengths(results, name, least, aim)
    for variant, words in (("small_fixed", "2,048 tokens"), ("small_text_packed", "text lengths")):
        what = f"small models, {words}, tokens/s"
        yield Bound(what, _figure(results, variant, "tokens_per_second"), 80_000, 100_000, TOKENS)


def _lengths(results: Results, name: str, least: float, aim: float) -> Iterator[Bound]:
    """Yield the bounds of documents whose lengths are drawn from a distribution."""
    what, variant = f"{name} lengths, packed: ", f"{name}_packed"
    fixed = _figure(results, variant, "times_fixed")
    yield Bound(what + "of one length's rate", fixed, 0.9, 0.97, TIMES)
    yield Bound(what + "of padded rows", _figure(results, variant, "times_beside"), least, aim, TIMES)
    padding = (_figure(results, variant, "median") or {}).get("padding")
    yield Bound(what + "padding", padding, 0.03, 0.01, "{:.2%}", most=True)


def _rates(results: Results) -> Iterator[Bound]:
    limits = (
        ("P-KL", ("p_kl_wide",), 25_000, 30_000),
        ("gold", ("gold_wide",), 22_000, 27_000),
        ("H-KL", ("h_kl_wide",), 22_000, 27_000),
        ("chain", ("chain_wide", "chain_hidden_wide"), 30_000, 33_000),
        ("chain, 8-bit teacher", ("chain_fp8_wide",), None, 38_000),
        ("P-KL, 8-bit teacher", ("p_kl_fp8_wide",), None, 40_000),
        ("P-KL, 8-bit teacher, MPS", ("p_kl_fp8_wide_mps",), None, 40_000),
    )
    for words, variants, must, aim in limits:
        rates = [_figure(results, name, "tokens_per_second") for name in variants]
        best = max((rate for rate in rates if rate is not None), default=None)
        yield Bound(f"{words}, tokens/s", best, must, aim, TOKENS)
    for variant, name, must, words in (
        ("p_kl_wide", "times_serial", 1.75, "P-KL, of the serial loop"),
        ("gold_wide", "times_serial", 2.5, "gold, of the serial loop"),
        ("h_kl_wide", "times_serial", 2.5, "H-KL, of the serial loop"),
        ("gold_wide", "times_public", 2.5, "gold, of the serial loop with TRL's loss"),
    ):
        yield Bound(words, _figure(results, variant, name), must, form=TIMES)


def _two_gpus(results: Results) -> Iterator[Bound]:
    apart = _figure(results, "teacher_apart", "times_beside")
    yield Bound("two GPUs, teacher apart, of one GPU", apart, 1.5, 1.8, TIMES)
    measured = {name: _figure(results, name, "times_beside") for name in FSDP2_VARIANTS}
    times = {name: value for name, value in measured.items() if value is not None}
    best = max(times, key=lambda name: times[name], default="")
    yield Bound("two GPUs, FSDP2, of one GPU", times.get(best), 1.8, 1.95, TIMES)
    difference = _figure(results, best, "loss_difference")
    largest = difference["largest"] if difference else None
    yield Bound("its loss, largest difference of a step from one GPU", largest, 1e-3, form="{:.5f}", most=True)


def _figure(results: Results, variant: str, name: str) -> Any:
    """Return a variant's figure from the first result file that has it."""
    values = (result["variants"].get(variant, {}).get(name) for result in results.values())
    return next((value for value in values if value is not None), None)


def _wait(results: Results) -> float | None:
    """Return the worst sum of both waits; a teacher's slot is claimed through the queue too."""
    variants = [variant for result in results.values() for variant in result["variants"].values()]
    medians = [variant["median"] for variant in variants if variant["wide"] and "median" in variant]
    return max((median["data_wait"] + median["teacher_wait"] for median in medians), default=None)


def _memory(results: Results, name: str) -> float | None:
    for result in results.values():
        variant = result["variants"].get(name, {})
        serial = result["serial"].get(variant.get("serial", ""))
        above = bytes_above_state(variant)
        if serial and above is not None:
            return float(above / serial["peak_bytes_above_state"])
    return None
