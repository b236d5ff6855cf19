"""Charts of a run's page and of the comparison of runs: their metrics, labels and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xtoken_services.control.web.loss_terms import (
    CROSS_ENTROPY,
    ce_weight,
    divergence_name,
    kd_weights,
    names_by_teacher,
    weighted,
)

GIB = float(1 << 30)
MIB = float(1 << 20)
MAIN, DETAIL, SPEED = "main", "detail", "speed"


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
        source: `steps`, `eval` or `gauges`; gauges are drawn over time, the others over steps.
        unit: Unit of the values after division by `divisor`.
        lines: Lines of the chart.
        divisor: Divisor of the values.
        floor: Largest lower end of the y axis; None scales it to the values.
        min_lines: The chart is hidden if it has fewer lines.
        group: Part of the page: `main` (large), `detail` (small) or `speed` (small, folded).
    """

    name: str
    title: str
    source: str
    unit: str
    lines: tuple[Line, ...]
    divisor: float = 1.0
    floor: float | None = None
    min_lines: int = 1
    group: str = DETAIL


HELD_OUT = Chart(
    "held-out",
    "Held-out text",
    "eval",
    "bits per byte",
    (Line("bits_per_byte", "bits per byte"), Line("bits_per_byte_*", "of", single_label="of another text")),
    group=MAIN,
)
TASKS = Chart(
    "tasks",
    "Tasks",
    "eval",
    "% right",
    (Line("task_accuracy_*", "", single_label="right"),),
    divisor=0.01,
    floor=0.0,
)
QUALITY = (
    Chart(
        "held-out-agreement",
        "Held-out accuracy",
        "eval",
        "%",
        (
            Line("next_token_accuracy", "next token"),
            Line("held_out_proj_accuracy*", "with teacher", "with the teacher"),
        ),
        divisor=0.01,
        floor=0.0,
    ),
    Chart(
        "agreement",
        "Training accuracy",
        "steps",
        "%",
        (Line("accuracy", "next token"), Line("proj_accuracy*", "with teacher", "with the teacher")),
        divisor=0.01,
        floor=0.0,
    ),
    Chart(
        "mass",
        "Teacher's probability",
        "steps",
        "%",
        (
            Line("chunk_mass*", "compared, teacher", single_label="compared"),
            Line("unreachable_mass*", "without gradient, teacher", single_label="without gradient"),
        ),
        divisor=0.01,
        floor=0.0,
    ),
    Chart("gradient", "Gradient norm", "steps", "before clipping", (Line("grad_norm", "norm"),), floor=0.0),
    Chart("weights", "Teacher weights", "steps", "weight", (Line("weight_t*", "teacher"),), floor=0.0, min_lines=2),
)
RATES = (
    Chart(
        "throughput",
        "Throughput",
        "steps",
        "tokens/s",
        (Line("tokens_per_second", "tokens/s"),),
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "waiting",
        "Time of a step",
        "steps",
        "%",
        (
            Line("teacher_wait", "waiting for the teacher"),
            Line("data_wait", "waiting for data"),
            Line("mfu", "of the peak FLOP/s"),
        ),
        divisor=0.01,
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "parts",
        "Step time by phase",
        "steps",
        "ms on the device",
        (
            Line("forward_seconds", "forward"),
            Line("loss_seconds", "loss"),
            Line("backward_seconds", "backward"),
            Line("optimizer_seconds", "optimiser"),
        ),
        divisor=1e-3,
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "memory",
        "Trainer memory",
        "steps",
        "GiB",
        (Line("memory_peak_bytes", "peak per step"),),
        divisor=GIB,
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "store",
        "Stored teacher output",
        "steps",
        "MiB read per step",
        (Line("store_bytes", "read"),),
        divisor=MIB,
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "store-records",
        "Records of a teacher's store",
        "steps",
        "samples per step",
        (Line("store_hits", "read"), Line("store_misses", "missing, skipped")),
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "store-wait",
        "Wait for a teacher's store",
        "steps",
        "s per step",
        (Line("store_wait_seconds", "waited"),),
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "served",
        "Answers of the teacher's servers",
        "steps",
        "per step",
        (Line("served_requests", "answered"), Line("served_retries", "repeated")),
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "served-bytes",
        "Size of the servers' answers",
        "steps",
        "MiB per step",
        (Line("served_bytes", "received"),),
        divisor=MIB,
        floor=0.0,
        group=SPEED,
    ),
    Chart(
        "served-wait",
        "Teacher's wait for its servers",
        "steps",
        "s per step",
        (Line("served_wait_seconds", "waited"),),
        floor=0.0,
        group=SPEED,
    ),
    Chart("queue", "Queue", "gauges", "samples", (Line("queue_samples", "held"),), floor=0.0, group=SPEED),
    Chart(
        "gpu-memory",
        "GPU memory",
        "gauges",
        "GiB",
        (Line("gpu_memory*", "GPU"),),
        divisor=GIB,
        floor=0.0,
        group=SPEED,
    ),
    Chart("gpu-use", "GPU utilization", "gauges", "%", (Line("gpu_use*", "GPU"),), floor=0.0, group=SPEED),
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
        "steps",
        "nats per chunk",
        tuple(
            Line(f"chunk_kl_{prefix}{each}_t*", f"{label}, teacher", single_label=label)
            for each, label in CLASSES.items()
        ),
        floor=0.0,
    )
    for name, title, prefix in (
        ("classes", "Divergence by class: text", ""),
        ("classes-generated", "Divergence by class: completions", "generated_"),
    )
)
"""Charts of runs with rollouts."""
COMPARED = (
    Chart("held-out", "Held-out text", "eval", "bits per byte", (Line("bits_per_byte", ""),), group=MAIN),
    Chart("ce", "Training cross-entropy", "steps", "nats per token", (Line("ce_loss", ""),), group=MAIN),
    replace(TASKS, group=MAIN),
    Chart("agreement", "Training accuracy", "steps", "%", (Line("accuracy", ""),), divisor=0.01, floor=0.0, group=MAIN),
    Chart("throughput", "Throughput", "steps", "tokens/s", (Line("tokens_per_second", ""),), floor=0.0, group=MAIN),
)
"""Charts in which runs of different losses are comparable."""


def charts_of(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> tuple[Chart, ...]:
    """Return the charts of a run.

    Args:
        spec: Its specification as JSON.
        same_tokenizer: True for each teacher with the student's tokenizer; empty if that is not known yet.
    """
    loss = Chart("loss", "Loss", "steps", "nats, weighted", _terms(spec, same_tokenizer, ""), group=MAIN)
    held_out = Chart(
        "held-out-loss", "Held-out loss", "eval", "nats, weighted", _terms(spec, same_tokenizer, "held_out_")
    )
    by_class = BY_CLASS if spec.get("rollout") else ()
    return (HELD_OUT, loss, TASKS, *QUALITY, *by_class, held_out, *RATES)


def _terms(spec: Mapping[str, Any], same_tokenizer: Sequence[bool], prefix: str) -> tuple[Line, ...]:
    """Return a line for the loss and one for each of its terms, as large as it counts in the loss."""
    weight = ce_weight(spec)
    entropy = Line(f"{prefix}ce_loss", weighted(CROSS_ENTROPY, weight), factor=weight)
    names = names_by_teacher(spec, same_tokenizer)
    if not names:
        return (Line(f"{prefix}loss", CROSS_ENTROPY),)
    loss = spec.get("loss") or {}
    times = kd_weights(spec)
    scale = (f"{prefix}kl_loss_scale",)
    added = loss.get("teacher_aggregation", "sum") == "sum" and not loss.get("normalize_teacher_by_vocab")
    if len(names) > 1 and added and not (prefix and loss.get("dynamic_teacher_weights")):
        weights = [1.0 if not prefix else float(t.get("weight", 1.0)) for t in spec["teacher"]]
        divergences = [
            Line(
                f"{prefix}kl_loss_t{i}",
                f"{weighted(name, *times)}, teacher {i}",
                factor=own,
                factor_keys=scale if prefix else (*scale, f"weight_t{i}"),
            )
            for i, (name, own) in enumerate(zip(names, weights, strict=True))
        ]
    else:
        name = weighted(divergence_name(spec, same_tokenizer), *times)
        divergences = [Line(f"{prefix}kl_loss", name, factor_keys=scale)]
    return (Line(f"{prefix}loss", "total"), *divergences, entropy)
