"""The weight of the KD term at a step: adaptive, by how far the student is behind its teacher on held-out text."""

from __future__ import annotations

import logging
import math
from collections import deque

from xtoken_core.config.loss import ADAPTIVE, MARGIN
from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.run.metric_lines import BITS, TEACHER_BITS, finite
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.export import lines_before_step

log = logging.getLogger("xtoken.trainer")

EVALUATIONS = 3
"""Evaluations whose mean is compared with the teacher."""
LEAST_BYTES = 64 << 10
"""Bytes of held-out text without which an adaptive weight stays as it is: its figure would be noise."""


class KdWeight:
    """Follower of the evaluations in `eval.jsonl`, which hold all that the weight depends on.

    So a resumed run has the weight that it would have had. All ranks call `update` together; the first one's file
    decides.

    Args:
        run: The run.
        group: All ranks.
    """

    def __init__(self, run: ResolvedRun, group: RankGroup) -> None:
        self.run, self.group = run, group
        self.behind: float | None = None
        """Bits per byte of the student less its best teacher's; None: not known, the weight is the first one."""
        self._logged = False

    def at(self, step: int) -> float:
        """Return the weight at a step."""
        return self.run.spec.loss.kl_weight_at(step, self.run.steps, self.behind)

    def update(self, step: int) -> None:
        """Read the evaluations up to a step, after a resume or an evaluation."""
        if self.run.spec.loss.kl_loss_weight_end != ADAPTIVE or not self.run.spec.loss.weighs_kd:
            return
        found = self._read(step) if self.group.is_leader else None
        self.behind = self.group.all_gather(found)[0]

    def _read(self, step: int) -> float | None:
        lines = deque(lines_before_step(self.run.spec.output / "eval.jsonl", step + 1), maxlen=EVALUATIONS)
        rows = [finite(line) for line in lines]
        after_start = [row[BITS] for row in rows if row["step"] > 0 and BITS in row]
        why = _why_constant(rows[-1] if rows else {})
        if why:
            self._log_constant(why)
        if why or not after_start:
            return None
        behind = math.fsum(after_start) / len(after_start) - rows[-1][TEACHER_BITS]
        if behind <= -MARGIN and (self.behind is None or self.behind > -MARGIN):
            log.info("the student is ahead of its teacher on held-out text: it learns from the text alone")
        return behind

    def _log_constant(self, why: str) -> None:
        if not self._logged:
            log.info("the weight of the divergence stays %g: %s", self.run.spec.loss.kl_loss_weight, why)
        self._logged = True


def _why_constant(last: dict[str, float]) -> str:
    """Return why the last evaluation does not decide the weight; empty if it does."""
    if not last:
        return "there is no held-out text ([eval])"
    if last.get("bytes", 0) < LEAST_BYTES:
        return f"fewer than {LEAST_BYTES >> 10} KiB of held-out text are read (eval.max_bytes)"
    if TEACHER_BITS not in last:
        return "the teacher has not been measured on the held-out text"
    return ""
