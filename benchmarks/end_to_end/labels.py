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
STEP_PARTS = {
    "forward_seconds": "forward",
    "loss_seconds": "loss",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimiser",
}
"""Fields of a trainer's step record, and how they are called."""
Results = dict[str, dict[str, Any]]
FSDP2_VARIANTS = ("two_ranks", "two_ranks_kept", "two_ranks_mps")
TOKENS, TIMES = "{:,.0f}", "{:.2f}"


def loss_of(serial: str) -> str:
    """Return the loss of a serial loop by the loop's key, such as `gold public`."""
    loss, _, kind = serial.partition(" ")
    return LOSSES[loss] + (" by TRL's GOLD loss" if kind == "public" else "")


def activations_of(serial: str) -> str:
    """Return whether a serial loop's activations are kept or recomputed."""
    return "recomputed" if serial.endswith(" checkpointed") else "kept"


def label_of(variant: dict[str, Any]) -> str:
    """Return the loss of a variant and its settings."""
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
        ", 135M student from 270M teacher": variant.get("pair") == "135m_270m",
        f", lengths of {variant.get('lengths')}": variant.get("lengths"),
        ", padded": train.get("packing") == "off",
    }
    return loss_of(variant["serial"]) + "".join(words for words, applies in parts.items() if applies)


def machines_of(result: dict[str, Any]) -> int:
    """Return how many machines of a kind a result file's calls were on."""
    return len({call.get("digest", result["machine"].get("digest")) for call in result["calls"]})


def bytes_above_state(variant: dict[str, Any]) -> int | None:
    """Return the bytes that a GPU's processes took beyond weights, gradients and moments; None if not measured."""
    parts = ("peak_bytes_above_state", "teacher_bytes_above_weights", "ring_bytes")
    return sum(variant[part] for part in parts) if all(part in variant for part in parts) else None


def options_of(call: dict[str, Any]) -> str:
    """Return the options of one call of the benchmark."""
    words = ["--variants", *call["variants"]] if call["variants"] else []
    words += [f"--{name.replace('_', '-')}" for name in ("public_loss", "no_serial") if call.get(name)]
    return f"`{' '.join(words)}`" if words else "serial loops only"


def step_parts(variant: dict[str, Any]) -> dict[str, float]:
    """Return the parts of a trainer's step in seconds, as far as they were recorded."""
    median = variant.get("median", {})
    return {words: median[name] for name, words in STEP_PARTS.items() if name in median}


def bounds_of(results: Results) -> Iterator[Bound]:
    """Yield every bound with its figure from the first result file that has it."""
    yield from _rates(results)
    difference = _figure(results, "p_kl_fp8_wide", "loss_difference")
    mean = difference["mean"] if difference else None
    yield Bound("loss with a teacher in 8 bits, mean difference from bfloat16", mean, form="{:.4f}", most=True)
    what = "student waits for rows or for its teacher, fraction of a step, worst row with four samples together"
    yield Bound(what, _wait(results), 0.02, 0.005, "{:.2%}", most=True)
    for name, words in (("p_kl_hidden", "kept"), ("p_kl_hidden_checkpointed", "recomputed")):
        yield Bound(
            f"P-KL from hidden states, activations {words}: peak memory of trainer, teacher and ring above weights, "
            "gradients and moments, relative to the serial loop",
            _memory(results, name), 0.5, 0.25, "{:.0%}", most=True,
        )  # fmt: skip
    yield from _two_gpus(results)
    for name, least, aim in (("text", 1.4, 1.6), ("chat", 1.6, 1.8)):
        yield from _lengths(results, name, least, aim)
    for variant, words in (("small_fixed", "2,048 tokens"), ("small_text_packed", "lengths of text")):
        what = f"one GPU, 135M student from 270M teacher, documents of {words}, tokens/s"
        yield Bound(what, _figure(results, variant, "tokens_per_second"), 80_000, 100_000, TOKENS)


def _lengths(results: Results, name: str, least: float, aim: float) -> Iterator[Bound]:
    """Yield the bounds of documents whose lengths are drawn from a distribution."""
    what, variant = f"one GPU, lengths of {name}, packed, ", f"{name}_packed"
    median = _figure(results, variant, "median") or {}
    yield Bound(what + "tokens/s", _figure(results, variant, "tokens_per_second"), form=TOKENS)
    yield Bound(what + "MFU", median.get("mfu"), form="{:.1%}")
    fixed = _figure(results, variant, "times_fixed")
    yield Bound(what + "relative to documents of one length", fixed, 0.9, 0.97, TIMES)
    yield Bound(what + "relative to padded rows", _figure(results, variant, "times_beside"), least, aim, TIMES)
    padding = median.get("padding")
    yield Bound(what + "computed positions that are no token", padding, 0.03, 0.01, "{:.2%}", most=True)


def _rates(results: Results) -> Iterator[Bound]:
    serial, one = "relative to the serial loop", "one GPU, "
    like = f"P-KL, one sample at a time as in the serial loop, {serial}"
    yield Bound(one + like, _figure(results, "p_kl_hidden", "times_serial"), form=TIMES)
    yield Bound(one + "P-KL, tokens/s", _figure(results, "p_kl_wide", "tokens_per_second"), 25_000, 30_000, TOKENS)
    yield Bound(one + f"P-KL, {serial}", _figure(results, "p_kl_wide", "times_serial"), 1.75, form=TIMES)
    for loss, name in (("gold", "gold"), ("h_kl", "H-KL")):
        rate = _figure(results, f"{loss}_wide", "tokens_per_second")
        yield Bound(one + f"{name}, tokens/s", rate, 22_000, 27_000, TOKENS)
        yield Bound(one + f"{name}, {serial}", _figure(results, f"{loss}_wide", "times_serial"), 2.5, form=TIMES)
    public = _figure(results, "gold_wide", "times_public")
    yield Bound(one + f"gold, {serial} with TRL's GOLD loss", public, 2.5, form=TIMES)
    chain = [_figure(results, name, "tokens_per_second") for name in ("chain_wide", "chain_hidden_wide")]
    best = max((rate for rate in chain if rate is not None), default=None)
    yield Bound(one + "chain, tokens/s", best, 30_000, 33_000, TOKENS)
    rate = _figure(results, "chain_fp8_wide", "tokens_per_second")
    yield Bound(one + "chain, teacher in 8 bits, tokens/s", rate, None, 38_000, TOKENS)
    for variant, words in (("p_kl_fp8_wide", ""), ("p_kl_fp8_wide_mps", ", with MPS")):
        rate = _figure(results, variant, "tokens_per_second")
        yield Bound(one + f"P-KL, teacher in 8 bits{words}, tokens/s", rate, None, 40_000, TOKENS)


def _two_gpus(results: Results) -> Iterator[Bound]:
    apart = _figure(results, "teacher_apart", "times_beside")
    yield Bound("two GPUs, teacher on its own, relative to one GPU", apart, 1.5, 1.8, TIMES)
    measured = {name: _figure(results, name, "times_beside") for name in FSDP2_VARIANTS}
    times = {name: value for name, value in measured.items() if value is not None}
    best = max(times, key=lambda name: times[name], default="")
    what = "two GPUs, student shared by FSDP2, a teacher each, relative to one GPU"
    yield Bound(what, times.get(best), 1.8, 1.95, TIMES)
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
