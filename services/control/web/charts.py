"""Which curves a run's page draws, from which figures, in which units."""

from __future__ import annotations

from dataclasses import dataclass

GIB = float(1 << 30)


@dataclass(frozen=True)
class Line:
    """One curve: the figure's name, what the reader calls it, and what if it is the only one of a key with `*`."""

    key: str
    label: str
    alone: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves that share axes.

    Attributes:
        source: `steps`, `eval` or `gauges`; the last go by time, all others by step.
        unit: Of its values, once divided by `divisor`.
        lines: Its curves; a key that ends in `*` takes all figures that begin so.
        floor: Where its axis begins at the least; None leaves that to its values.
        least: With fewer curves than this it is not drawn.
    """

    name: str
    title: str
    source: str
    unit: str
    lines: tuple[Line, ...]
    divisor: float = 1.0
    floor: float | None = None
    least: int = 1


CHARTS = (
    Chart("loss", "Loss", "steps", "nats", (Line("loss", "total"), Line("kl_loss", "KL"), Line("ce_loss", "CE"))),
    Chart(
        "held-out", "Held-out text", "eval", "bits per byte",
        (Line("bits_per_byte", "bits per byte"),),
    ),
    Chart(
        "held-out-loss", "Loss on held-out text", "eval", "nats",
        (Line("held_out_loss", "total"), Line("held_out_kl_loss", "KL"), Line("held_out_ce_loss", "CE")),
    ),
    Chart("teachers", "KL by teacher", "steps", "nats", (Line("kl_loss_t*", "teacher"),), least=2),
    Chart(
        "weights", "Weight of each teacher", "steps", "as applied",
        (Line("weight_t*", "teacher"),), floor=0.0, least=2,
    ),
    Chart(
        "held-out-teachers", "KL by teacher on held-out text", "eval", "nats",
        (Line("held_out_kl_loss_t*", "teacher"),), least=2,
    ),
    Chart("throughput", "Throughput", "steps", "tokens/s", (Line("tokens_per_second", "tokens/s"),), floor=0.0),
    Chart(
        "waiting", "Waiting, share of a step", "steps", "%",
        (Line("teacher_wait", "for the teacher"), Line("data_wait", "for data")), divisor=0.01, floor=0.0,
    ),
    Chart(
        "parts", "Parts of a step", "steps", "ms on the device",
        (
            Line("forward_seconds", "forward"), Line("loss_seconds", "loss"),
            Line("backward_seconds", "backward"), Line("optimizer_seconds", "optimiser"),
        ),
        divisor=1e-3, floor=0.0,
    ),
    Chart(
        "agreement", "Agreement", "steps", "%",
        (Line("accuracy", "next token"), Line("proj_accuracy*", "with the teacher")), divisor=0.01, floor=0.0,
    ),
    Chart(
        "held-out-agreement", "Agreement on held-out text", "eval", "%",
        (Line("next_token_accuracy", "next token"), Line("held_out_proj_accuracy*", "with the teacher")),
        divisor=0.01, floor=0.0,
    ),
    Chart(
        "chunk-mass", "Chunk mass", "steps", "mean per chunk",
        (Line("chunk_mass*", "teacher", alone="mass"),), floor=0.0,
    ),
    Chart("gradient", "Gradient", "steps", "norm", (Line("grad_norm", "norm before clipping"),), floor=0.0),
    Chart("queue", "Queue", "gauges", "samples", (Line("queue_samples", "held"),), floor=0.0),
    Chart(
        "memory", "Memory of the trainer", "steps", "GiB",
        (Line("memory_peak_bytes", "highest of a step"),), divisor=GIB, floor=0.0,
    ),
    Chart("gpu-memory", "GPU memory", "gauges", "GiB", (Line("gpu_memory*", "GPU"),), divisor=GIB, floor=0.0),
    Chart("gpu-use", "GPU use", "gauges", "%", (Line("gpu_use*", "GPU"),), floor=0.0),
    Chart("mfu", "Use of the GPU's arithmetic", "steps", "%", (Line("mfu", "MFU"),), divisor=0.01, floor=0.0),
)  # fmt: skip
