"""A run as its page shows it: what follows from its status, so that templates only place it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.control.web.render import TONES, figure, percent, seconds_since, size
from services.supervisor.run_record import RunState

RECENT_STEPS = 20


class RunView:
    """A run.

    Args:
        status: Its fields, of a list or of its own.
        steps: The last lines of its curves.
    """

    def __init__(self, status: Mapping[str, Any], steps: Sequence[Mapping[str, Any]] = ()) -> None:
        self._status, self._steps = status, steps
        self.id: str = status["id"]
        self.name: str = status["name"]
        self.output = str(status["output"])
        self.state = RunState(status["state"])
        self.tone = TONES[self.state]
        self.going = not self.state.over
        self.error: str = status.get("error") or ""
        self.life: int = status.get("life") or 1
        self.began: str | None = status.get("began") or status["created"]
        self.ended: str | None = status.get("ended")
        self.step: int | None = status.get("step")
        self.steps: int | None = status.get("steps")
        self.text_read: float | None = status.get("text_read")
        self.workers: list[dict[str, Any]] = status.get("workers") or []
        self.spec: dict[str, Any] = status.get("spec") or {}
        self.summary: dict[str, Any] | None = status.get("summary")

    @property
    def seconds(self) -> float | None:
        """How long it has gone on, or went on, since it was last started."""
        if self.began is None:
            return None
        return seconds_since(self.began) - (seconds_since(self.ended) if self.ended else 0.0)

    @property
    def left_s(self) -> float | None:
        """How long it will still take at the pace of its last steps; None if that cannot be told."""
        paces = [line["seconds"] for line in self._steps[-RECENT_STEPS:] if line.get("seconds")]
        if self.state != RunState.RUNNING or not paces or self.step is None or self.steps is None:
            return None
        return (self.steps - self.step) * float(sum(paces)) / len(paces)

    @property
    def share(self) -> float | None:
        """How much of it is done."""
        return self.step / self.steps if self.step is not None and self.steps else None

    @property
    def resumable(self) -> bool:
        """Whether it can be gone on with."""
        return self.state.over and self.state != RunState.COMPLETED

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """Its last figures: what, how much, and of what."""
        last, read = self._status.get("last") or {}, self._status.get("evaluation") or {}
        queue = (self._status.get("queue") or {}) if self.going else {}
        masses = _masses(last)
        waits = {name: last[key] for name, key in (("teacher", "teacher_wait"), ("data", "data_wait")) if key in last}
        found = [
            ("Loss", figure(last.get("loss")), _parts(last)),
            ("Held-out text", figure(read.get("bits_per_byte")), f"bits per byte after {read['step']:,} steps"
             if "bits_per_byte" in read else ""),
            ("Held-out KL", figure(read.get("held_out_kl_loss")), "nats"),
            ("Held-out accuracy", percent(read.get("next_token_accuracy")), "of the next tokens"),
            ("Throughput", figure(last.get("tokens_per_second")), "tokens/s"),
            ("Waiting", percent(max(waits.values(), default=None)), _waiting(waits)),
            ("Chunk mass", figure(min(masses.values(), default=None)), _lowest(masses)),
            ("Queue", figure(queue.get("samples")), f"samples, {size(queue['bytes'])}" if queue else "samples"),
            ("Memory", size(last.get("memory_peak_bytes")), "highest of a step, trainer"),
        ]  # fmt: skip
        return [tile for tile in found if tile[1] != "–"]


def _parts(last: Mapping[str, Any]) -> str:
    named = (("KL", last.get("kl_loss")), ("CE", last.get("ce_loss")))
    return ", ".join(f"{name} {figure(v)}" for name, v in named if v is not None and math.isfinite(v))


def _waiting(waits: Mapping[str, float]) -> str:
    if not waits:
        return ""
    return f"of a step, for its {max(waits, key=lambda name: waits[name])}"


def _masses(last: Mapping[str, Any]) -> dict[str, float]:
    """By teacher; averaged logits have one in common."""
    masses = {name: value for name, value in last.items() if name.startswith("chunk_mass") and value is not None}
    return {name.removeprefix("chunk_mass_t"): value for name, value in masses.items()}


def _lowest(masses: Mapping[str, float]) -> str:
    if len(masses) < 2:
        return "mean per chunk"
    return f"per chunk, of teacher {min(masses, key=lambda name: masses[name])}"
