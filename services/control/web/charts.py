"""Charts of a run's page: their metrics, labels and units."""

from __future__ import annotations

from dataclasses import dataclass

GIB = float(1 << 30)


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        key: Name of the metric; with a trailing `*`, all metrics with that prefix, as one line each.
        label: Label in the legend; with a `*`, the rest of the metric's name is appended.
        single_label: Label if a key with `*` matches a single metric.
    """

    key: str
    label: str
    single_label: str = ""


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
    """

    name: str
    title: str
    source: str
    unit: str
    lines: tuple[Line, ...]
    divisor: float = 1.0
    floor: float | None = None
    min_lines: int = 1


CHARTS = (
    Chart("loss", "Loss", "steps", "nats", (Line("loss", "total"), Line("kl_loss", "KL"), Line("ce_loss", "CE"))),
    Chart(
        "held-out", "Evaluation", "eval", "bits per byte",
        (Line("bits_per_byte", "bits per byte"), Line("bits_per_byte_*", "of", single_label="of another text")),
    ),
    Chart(
        "held-out-loss", "Evaluation loss", "eval", "nats",
        (Line("held_out_loss", "total"), Line("held_out_kl_loss", "KL"), Line("held_out_ce_loss", "CE")),
    ),
    Chart("teachers", "KL by teacher", "steps", "nats", (Line("kl_loss_t*", "teacher"),), min_lines=2),
    Chart(
        "weights", "Teacher weights", "steps", "weight",
        (Line("weight_t*", "teacher"),), floor=0.0, min_lines=2,
    ),
    Chart(
        "held-out-teachers", "Evaluation KL by teacher", "eval", "nats",
        (Line("held_out_kl_loss_t*", "teacher"),), min_lines=2,
    ),
    Chart("throughput", "Throughput", "steps", "tokens/s", (Line("tokens_per_second", "tokens/s"),), floor=0.0),
    Chart(
        "waiting", "Wait time per step", "steps", "%",
        (Line("teacher_wait", "for the teacher"), Line("data_wait", "for data")), divisor=0.01, floor=0.0,
    ),
    Chart(
        "parts", "Step time by phase", "steps", "ms on the device",
        (
            Line("forward_seconds", "forward"), Line("loss_seconds", "loss"),
            Line("backward_seconds", "backward"), Line("optimizer_seconds", "optimiser"),
        ),
        divisor=1e-3, floor=0.0,
    ),
    Chart(
        "agreement", "Accuracy", "steps", "%",
        (Line("accuracy", "next token"), Line("proj_accuracy*", "with the teacher")), divisor=0.01, floor=0.0,
    ),
    Chart(
        "held-out-agreement", "Evaluation accuracy", "eval", "%",
        (Line("next_token_accuracy", "next token"), Line("held_out_proj_accuracy*", "with the teacher")),
        divisor=0.01, floor=0.0,
    ),
    Chart(
        "chunk-mass", "Chunk mass", "steps", "mean per chunk",
        (Line("chunk_mass*", "teacher", single_label="mass"),), floor=0.0,
    ),
    Chart(
        "unreachable", "Unreachable mass", "steps", "% of the teacher",
        (Line("unreachable_mass*", "teacher", single_label="without gradient"),), divisor=0.01, floor=0.0,
    ),
    Chart("gradient", "Gradient norm", "steps", "norm", (Line("grad_norm", "before clipping"),), floor=0.0),
    Chart("queue", "Queue", "gauges", "samples", (Line("queue_samples", "held"),), floor=0.0),
    Chart(
        "memory", "Trainer memory", "steps", "GiB",
        (Line("memory_peak_bytes", "peak per step"),), divisor=GIB, floor=0.0,
    ),
    Chart("gpu-memory", "GPU memory", "gauges", "GiB", (Line("gpu_memory*", "GPU"),), divisor=GIB, floor=0.0),
    Chart("gpu-use", "GPU utilization", "gauges", "%", (Line("gpu_use*", "GPU"),), floor=0.0),
    Chart("mfu", "Model FLOPs utilization", "steps", "%", (Line("mfu", "MFU"),), divisor=0.01, floor=0.0),
)  # fmt: skip
