"""The weight of the KD term at a step: adaptive, by how far the student is behind its teacher.

On held-out text; without any, on the text that it trains on, as long as no record has been read before.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from xtoken_core.config.loss import ADAPTIVE, LEAST_BYTES, margins_behind
from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.files.jsonl import lines_before_step
from xtoken_services.common.run.metric_lines import BITS, TEACHER_BITS, finite
from xtoken_services.trainer.distributed import RankGroup

log = logging.getLogger("xtoken.trainer")

EVALUATIONS = 3
"""Evaluations, or windows of the training text, whose mean is compared with the teacher."""
TEXT, TEXT_BYTES, NATS = "text_", "text_bytes", ("text_nats", "text_teacher_nats")
"""Prefixes of the metrics of `TextNats`; of the student's and of the teacher's sum."""
Window = dict[str, float]
"""Sums of the metrics of `TextNats` over some steps."""


class KdWeight:
    """Follower of the run's files, `eval.jsonl` or `steps.jsonl`, which hold all that the weight depends on.

    So a resumed run has the weight that it would have had. All ranks call `update` together; the first one's file
    decides. They also call `after_step`, with metrics that are the same on all.

    Args:
        run: The run.
        group: All ranks.
    """

    def __init__(self, run: ResolvedRun, group: RankGroup) -> None:
        self.run, self.group = run, group
        self.behind: float | None = None
        """As `margins_behind` its best teacher; None: not known, the weight is the first one."""
        self._windows: list[Window] = [{}]
        self._logged = False
        loss = run.spec.loss
        self._adapts = loss.kl_loss_weight_end == ADAPTIVE and loss.weighs_kd

    def at(self, step: int) -> float:
        """Return the weight at a step."""
        return self.run.spec.loss.kl_weight_at(step, self.run.steps, self.behind, after=self.run.prompts.after)

    def measures(self, step: int) -> bool:
        """Return True if both sides are measured on a step's text, because there is no held-out text."""
        spec = self.run.spec
        follows_text = self._adapts and spec.eval is None and spec.rollout is None
        return follows_text and (step + 1) * spec.train.samples_per_step <= self.run.first_pass

    def update(self, step: int) -> None:
        """Read the files up to a step, after a resume or an evaluation."""
        if not self._adapts:
            return
        if self.run.spec.eval is not None:
            self._follow(self.group.all_gather(self._held_out(step) if self.group.is_leader else None)[0])
        elif self.measures(0):
            self._windows = self.group.all_gather(self._text(step) if self.group.is_leader else [])[0]
            self._follow(_behind_on_text(self._windows))
            size = LEAST_BYTES >> 10
            log.info("no held-out text ([eval]): the first pass decides the divergence's weight, every %d KiB", size)
        else:
            self._log_constant("there is no held-out text ([eval]), and no step of given text that is new to the run")

    def after_step(self, step: int, row: Mapping[str, Any]) -> None:
        """Take in a step's metrics, as they will be in `steps.jsonl`."""
        if self.measures(step):
            if "loss" in row and not any(name.startswith(TEXT) for name in row):
                self._log_constant("the loss does not name the text that it compares, and there is no held-out text")
            self._windows = _with_step(self._windows, row)
            self._follow(_behind_on_text(self._windows))
            if step + 1 < self.run.steps and not self.measures(step + 1):
                self._log_constant("all text has been read once, and there is no held-out text ([eval])", step + 1)

    def _follow(self, behind: float | None) -> None:
        if behind is not None and behind <= -1 and (self.behind is None or self.behind > -1):
            log.info("the student is ahead of its teacher: it learns from the text alone")
        self.behind = behind

    def _held_out(self, step: int) -> float | None:
        lines = deque(lines_before_step(self.run.spec.output / "eval.jsonl", step + 1), maxlen=EVALUATIONS)
        rows = [finite(line) for line in lines]
        why = why_constant(rows[-1]) if rows else ""
        if why:
            self._log_constant(why, step)
        if why or not any(BITS in row for row in rows):
            return None
        # Teachers of different texts count until the student has passed the best one of each text.
        also = self.run.spec.eval.also_by_name if self.run.spec.eval is not None and self.run.routes else ()
        named = [f"_{name}" for name in also if any(f"{BITS}_{name}" in row for row in rows)]
        return max(_behind(rows, suffix) for suffix in ("", *named) if not why_constant(rows[-1], suffix))

    def _text(self, step: int) -> list[Window]:
        windows: list[Window] = [{}]
        for row in lines_before_step(self.run.spec.output / "steps.jsonl", step):
            windows = _with_step(windows, row)
        return windows

    def _log_constant(self, why: str, step: int = 0) -> None:
        if not self._logged:
            log.info("the weight of the divergence stays %g: %s", self.at(step), why)
        self._logged = True


def _behind(rows: Sequence[Mapping[str, float]], suffix: str) -> float:
    """Return how far the student is behind its best teacher, in margins; of a text of `eval.also` with its suffix."""
    scored = [(row["step"], row[BITS + suffix]) for row in rows if BITS + suffix in row]
    after_start = [bits for step, bits in scored if step > 0] or [bits for _, bits in scored]
    return margins_behind(math.fsum(after_start) / len(after_start), rows[-1][TEACHER_BITS + suffix])


def why_constant(last: Mapping[str, float], suffix: str = "") -> str:
    """Return why the last evaluation does not decide the weight; empty if it does."""
    if last.get(f"bytes{suffix}", 0) < LEAST_BYTES:
        return f"fewer than {LEAST_BYTES >> 10} KiB of held-out text are read (eval.max_bytes)"
    if TEACHER_BITS + suffix not in last:
        return "the teacher has not been measured on the held-out text"
    return ""


def _with_step(windows: Sequence[Window], row: Mapping[str, Any]) -> list[Window]:
    """Return the last windows of the text with a step's metrics; the last one, which is not full, takes them.

    >>> _with_step([{"text_bytes_t0": 65530.0}], {"loss": 2.0, "text_bytes_t0": 6.0})
    [{'text_bytes_t0': 65536.0}, {}]
    """
    found = {name: value for name, value in row.items() if name.startswith(TEXT)}
    if row.get("nonfinite") or len(finite(found)) < len(found):
        return list(windows)
    last = windows[-1] | {name: windows[-1].get(name, 0.0) + value for name, value in found.items()}
    sizes = [value for name, value in last.items() if name.startswith(TEXT_BYTES)]
    full = bool(sizes) and min(sizes) >= LEAST_BYTES
    return [*windows[:-1], last, {}][-EVALUATIONS - 1 :] if full else [*windows[:-1], last]


def _behind_on_text(windows: Sequence[Window]) -> float | None:
    """Return how far the student is behind its best teacher on the full windows, in margins; None without one.

    >>> _behind_on_text([{"text_bytes_t0": 2.0, "text_nats_t0": 3.0, "text_teacher_nats_t0": 3.0}, {}])
    0.0
    """
    *full, _ = windows
    total = {name: math.fsum(window.get(name, 0.0) for window in full) for window in full for name in window}
    teachers = [name.removeprefix(TEXT_BYTES) for name in total if name.startswith(TEXT_BYTES)]
    bits = [
        [total[f"{name}{teacher}"] / total[TEXT_BYTES + teacher] / math.log(2) for name in NATS] for teacher in teachers
    ]
    return max((margins_behind(*pair) for pair in bits), default=None)
