"""View model of a run: what its page shows, derived from its status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.run_warnings import change_since_start, warnings_of
from services.control.web.formatting import number, percent, seconds_since, size
from services.supervisor.comparison import comparison_line
from services.supervisor.remaining import remaining_s
from services.supervisor.run_record import RunState

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
        """Estimated remaining seconds, evaluations included; None if unknown."""
        return remaining_s(self._status, self._steps) if self._steps else None

    @property
    def activities(self) -> list[str]:
        """Work of its workers that takes long, such as evaluating."""
        busy = [w for w in self.workers if w.get("activity") and w["state"] == "running"] if self.active else []
        checking = [str(self._status["checking"])] if self.active and self._status.get("checking") else []
        return checking + [f"{w['name']}: {w['activity']}" for w in busy]

    @property
    def progress(self) -> float | None:
        """Fraction of the steps that are done."""
        return self.step / self.steps if self.step is not None and self.steps else None

    @property
    def warnings(self) -> list[str]:
        """Warnings that its metrics call for."""
        return list(warnings_of(self._status).values())

    @property
    def comparison(self) -> str:
        """Comparison with its baseline in one line; empty without an evaluation of both."""
        return comparison_line(Path(self.output))

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
        unreachable = [v for name, v in last.items() if name.startswith("unreachable_mass") and v is not None]
        waits = {name: last[key] for name, key in (("teacher", "teacher_wait"), ("data", "data_wait")) if key in last}
        tiles = [
            ("Loss", number(last.get("loss")), _parts(last)),
            ("Evaluation", number(evaluation.get("bits_per_byte")), _evaluated(evaluation, self._status)),
            ("Evaluation KL", number(evaluation.get("held_out_kl_loss")), "nats"),
            ("Evaluation accuracy", percent(evaluation.get("next_token_accuracy")), "next token"),
            ("Throughput", number(last.get("tokens_per_second")), "tokens/s"),
            ("Unreachable mass", percent(max(unreachable, default=None)), "of the teacher, without gradient"),
            ("Wait time", percent(max(waits.values(), default=None)), _waiting(waits)),
            ("Chunk mass", number(min(masses.values(), default=None)), _lowest(masses)),
            ("Queue", number(queue.get("samples")), f"samples, {size(queue['bytes'])}" if queue else "samples"),
            ("Memory", size(last.get("memory_peak_bytes")), "trainer, peak per step"),
        ]  # fmt: skip
        return [tile for tile in tiles if tile[1] != "–"]


def _evaluated(evaluation: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if "bits_per_byte" not in evaluation:
        return ""
    change = change_since_start(status)
    since = f", {change:+.4f} since step 0" if change is not None else ""
    return f"bits per byte at step {evaluation['step']:,}{since}"


def _parts(last: Mapping[str, Any]) -> str:
    named = (("KL", last.get("kl_loss")), ("CE", last.get("ce_loss")))
    parts = [f"{name} {number(v)}" for name, v in named if v is not None and math.isfinite(v)]
    if last.get("kl_fraction") is not None:
        parts.append(f"{percent(last['kl_fraction'])} of it from KL")
    return ", ".join(parts)


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
