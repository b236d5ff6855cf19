"""Charts of a run's page and of the comparison of runs: their metrics, labels and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xtoken_services.common.run.loss_words import (
    CROSS_ENTROPY,
    ce_weight,
    divergence_name,
    kd_weights,
    loss_of,
    names_by_teacher,
    weighted,
)

DIVISORS = {"%": 0.01, "ms": 1e-3, "MiB": float(1 << 20), "GiB": float(1 << 30)}
"""Divisor of values that are drawn in a unit, by its first word."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        key: Name of the metric; with a trailing `*`, all metrics with that prefix, as one line each.
        label: Label in the legend; with a `*`, the rest of the metric's name is appended.
        single_label: Label if a key with `*` matches a single metric.
        factor: Constant that the metric is multiplied by.
        factor_keys: Metrics of the same row that it is multiplied by, where the row has them.
    """

    key: str
    label: str
    single_label: str = ""
    factor: float = 1.0
    factor_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: Identifier in the page.
        title: Title in the page.
        unit: Unit in which the values are drawn.
        lines: Lines of the chart.
        source: `steps`, `eval` or `gauges`; gauges are drawn over time, the others over steps.
        floor: Largest lower end of the y axis; None scales it to the values.
        min_lines: The chart is hidden if it has fewer lines.
    """

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    source: str = "steps"
    floor: float | None = 0.0
    min_lines: int = 1

    @property
    def divisor(self) -> float:
        """Divisor of the values."""
        return DIVISORS.get(self.unit.split()[0], 1.0)


HELD_OUT = Chart(
    "held-out",
    "Held-out text",
    "bits per byte",
    (
        Line("bits_per_byte", "bits per byte"),
        Line("teacher_bits_per_byte", "teacher"),
        Line("teacher_bits_per_byte_*", "teacher:"),
        Line("bits_per_byte_*", "of", "of another text"),
    ),
    "eval",
    floor=None,
)
TASKS = Chart("tasks", "Tasks", "% right", (Line("task_accuracy_*", "", "right"),), "eval")
QUALITY = (
    Chart("held-out-agreement", "Held-out accuracy", "%", (Line("next_token_accuracy", "next token"),), "eval"),
    Chart(
        "agreement",
        "Training accuracy",
        "%",
        (Line("accuracy", "next token"), Line("proj_accuracy*", "with teacher", "with the teacher")),
    ),
    Chart(
        "mass",
        "Teacher's probability",
        "%",
        (
            Line("chunk_mass*", "compared, teacher", "compared"),
            Line("unreachable_mass*", "without gradient, teacher", "without gradient"),
        ),
    ),
    Chart("gradient", "Gradient norm", "before clipping", (Line("grad_norm", "norm"),)),
    Chart("weights", "Teacher weights", "weight", (Line("weight_t*", "teacher"),), min_lines=2),
    Chart("samples", "Samples by teacher", "per step", (Line("samples_t*", "teacher"),), min_lines=2),
)
RATES = (
    Chart("throughput", "Throughput", "tokens/s", (Line("tokens_per_second", "tokens/s"),)),
    Chart(
        "waiting",
        "Time of a step",
        "%",
        (
            Line("teacher_wait", "waiting for the teacher"),
            Line("data_wait", "waiting for data"),
            Line("mfu", "of the peak FLOP/s"),
        ),
    ),
    Chart(
        "parts",
        "Step time by phase",
        "ms on the device",
        (
            Line("forward_seconds", "forward"),
            Line("loss_seconds", "loss"),
            Line("backward_seconds", "backward"),
            Line("optimizer_seconds", "optimiser"),
        ),
    ),
    Chart("memory", "Trainer memory", "GiB", (Line("memory_peak_bytes", "peak per step"),)),
    Chart("store", "Stored teacher output", "MiB read per step", (Line("store_bytes", "read"),)),
    Chart(
        "store-records",
        "Records of a teacher's store",
        "samples per step",
        (Line("store_hits", "read"), Line("store_misses", "missing, skipped")),
    ),
    Chart("store-wait", "Wait for a teacher's store", "s per step", (Line("store_wait_seconds", "waited"),)),
    Chart(
        "served",
        "Answers of the teacher's servers",
        "per step",
        (Line("served_requests", "answered"), Line("served_retries", "repeated")),
    ),
    Chart("served-bytes", "Size of the servers' answers", "MiB per step", (Line("served_bytes", "received"),)),
    Chart("served-wait", "Teacher's wait for its servers", "s per step", (Line("served_wait_seconds", "waited"),)),
    Chart("queue", "Queue", "samples", (Line("queue_samples", "held"),), "gauges"),
    Chart("gpu-memory", "GPU memory", "GiB", (Line("gpu_memory*", "GPU"),), "gauges"),
    # NVML gives a percentage, all other values in % are fractions.
    Chart("gpu-use", "GPU utilization", "%", (Line("gpu_use*", "GPU", factor=0.01),), "gauges"),
)
CLASSES = {
    "1to1": "1 to 1",
    "1ton": "1 to n",
    "nto1": "n to 1",
    "mton": "m to n",
    "numerals": "numerals",
    "whitespace": "white space",
}
"""Classes of chunks, by tokens of student and teacher or by content, with their labels."""
BY_CLASS = tuple(
    Chart(
        name,
        title,
        "nats per chunk",
        tuple(Line(f"chunk_kl_{prefix}{each}_t*", f"{label}, teacher", label) for each, label in CLASSES.items()),
    )
    for name, title, prefix in (
        ("classes", "Divergence by class: text", ""),
        ("classes-generated", "Divergence by class: completions", "generated_"),
    )
)
"""Charts of runs with rollouts."""
COMPARED = (
    Chart("held-out", "Held-out text", "bits per byte", (Line("bits_per_byte", ""),), "eval", floor=None),
    Chart("ce", "Training cross-entropy", "nats per token", (Line("ce_loss", ""),), floor=None),
    TASKS,
    Chart("agreement", "Training accuracy", "%", (Line("accuracy", ""),)),
    Chart("throughput", "Throughput", "tokens/s", (Line("tokens_per_second", ""),)),
)
"""Charts in which runs of different losses are comparable."""


def charts_of(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> dict[str, tuple[Chart, ...]]:
    """Return the charts of a run by part of its page: `main` (large), `detail` (small), `speed` (small, folded).

    Args:
        spec: Its specification as JSON.
        same_tokenizer: True for each teacher with the student's tokenizer; empty if that is not known yet.
    """
    loss = Chart("loss", "Loss", "nats, weighted", _terms(spec, same_tokenizer), floor=None)
    by_class = BY_CLASS if spec.get("rollout") else ()
    return {"main": (HELD_OUT, loss), "detail": (TASKS, *QUALITY, *by_class), "speed": RATES}


def _terms(spec: Mapping[str, Any], same_tokenizer: Sequence[bool]) -> tuple[Line, ...]:
    """Return a line for the loss and one for each of its terms, as large as it counts in the loss."""
    loss = loss_of(spec)
    weight = ce_weight(loss)
    entropy = Line("ce_loss", weighted(CROSS_ENTROPY, weight), factor=weight)
    names = names_by_teacher(spec, same_tokenizer)
    if not names:
        return (Line("loss", CROSS_ENTROPY),)
    times = kd_weights(loss)
    if len(names) > 1 and loss.teacher_aggregation == "sum" and not loss.normalize_teacher_by_vocab:
        divergences = [
            Line(
                f"kl_loss_t{i}", f"{weighted(name, *times)}, teacher {i}", factor_keys=("kl_loss_scale", f"weight_t{i}")
            )
            for i, name in enumerate(names)
        ]
    else:
        name = weighted(divergence_name(spec, same_tokenizer), *times)
        divergences = [Line("kl_loss", name, factor_keys=("kl_loss_scale",))]
    return (Line("loss", "total"), *divergences, entropy)
