"""View model of a run: what its page shows, derived from its status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.control.web.formatting import number, percent, seconds_since, size
from services.supervisor.run_record import RunState

RECENT_STEPS = 20
"""Steps whose mean duration gives the remaining time."""
TONES = {
    RunState.STARTING: "busy",
    RunState.RUNNING: "good",
    RunState.STOPPING: "busy",
    RunState.COMPLETED: "done",
    RunState.FAILED: "bad",
    RunState.STOPPED: "idle",
    RunState.INTERRUPTED: "warn",
}


class RunView:
    """View model of a run.

    Args:
        status: Its status, or its summary in a list.
        steps: Metrics of its last steps.
    """

    def __init__(self, status: Mapping[str, Any], steps: Sequence[Mapping[str, Any]] = ()) -> None:
        self._status, self._steps = status, steps
        self.id: str = status["id"]
        self.name: str = status["name"]
        self.output = str(status["output"])
        self.state = RunState(status["state"])
        self.tone = TONES[self.state]
        self.active = not self.state.over
        self.error: str = status.get("error") or ""
        self.launch: int = status.get("launch") or 1
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
        """Duration in seconds since its last start, up to its end."""
        if self.began is None:
            return None
        return seconds_since(self.began) - (seconds_since(self.ended) if self.ended else 0.0)

    @property
    def left_s(self) -> float | None:
        """Estimated remaining seconds from the duration of the last steps; None if unknown."""
        durations = [line["seconds"] for line in self._steps[-RECENT_STEPS:] if line.get("seconds")]
        if self.state != RunState.RUNNING or not durations or self.step is None or self.steps is None:
            return None
        return (self.steps - self.step) * float(sum(durations)) / len(durations)

    @property
    def progress(self) -> float | None:
        """Fraction of the steps that are done."""
        return self.step / self.steps if self.step is not None and self.steps else None

    @property
    def resumable(self) -> bool:
        """Return True if the run can be resumed."""
        return self.state.over and self.state != RunState.COMPLETED

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """Latest metrics as title, value and unit or description."""
        last, evaluation = self._status.get("last") or {}, self._status.get("evaluation") or {}
        queue = (self._status.get("queue") or {}) if self.active else {}
        masses = _masses(last)
        waits = {name: last[key] for name, key in (("teacher", "teacher_wait"), ("data", "data_wait")) if key in last}
        tiles = [
            ("Loss", number(last.get("loss")), _parts(last)),
            ("Evaluation", number(evaluation.get("bits_per_byte")), f"bits per byte at step {evaluation['step']:,}"
             if "bits_per_byte" in evaluation else ""),
            ("Evaluation KL", number(evaluation.get("held_out_kl_loss")), "nats"),
            ("Evaluation accuracy", percent(evaluation.get("next_token_accuracy")), "next token"),
            ("Throughput", number(last.get("tokens_per_second")), "tokens/s"),
            ("Wait time", percent(max(waits.values(), default=None)), _waiting(waits)),
            ("Chunk mass", number(min(masses.values(), default=None)), _lowest(masses)),
            ("Queue", number(queue.get("samples")), f"samples, {size(queue['bytes'])}" if queue else "samples"),
            ("Memory", size(last.get("memory_peak_bytes")), "trainer, peak per step"),
        ]  # fmt: skip
        return [tile for tile in tiles if tile[1] != "–"]


def _parts(last: Mapping[str, Any]) -> str:
    named = (("KL", last.get("kl_loss")), ("CE", last.get("ce_loss")))
    return ", ".join(f"{name} {number(v)}" for name, v in named if v is not None and math.isfinite(v))


def _waiting(waits: Mapping[str, float]) -> str:
    if not waits:
        return ""
    return f"of a step, for the {max(waits, key=lambda name: waits[name])}"


def _masses(last: Mapping[str, Any]) -> dict[str, float]:
    """Return the chunk mass by teacher; with averaged logits there is a single one."""
    masses = {name: value for name, value in last.items() if name.startswith("chunk_mass") and value is not None}
    return {name.removeprefix("chunk_mass_t"): value for name, value in masses.items()}


def _lowest(masses: Mapping[str, float]) -> str:
    if len(masses) < 2:
        return "mean per chunk"
    return f"per chunk, teacher {min(masses, key=lambda name: masses[name])}"
