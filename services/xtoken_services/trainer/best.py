"""The best evaluation of a run so far, from its `eval.jsonl`: its checkpoint is kept, and it decides an early end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.run.metric_lines import BITS, is_better
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.export import lines_before_step
from xtoken_services.trainer.optimizer import StudentOptimizer

log = logging.getLogger("xtoken.trainer")

NEVER = -1
LEAST_PATIENCE = 8
"""Evaluations without a better one before which `eval.patience = "half"` ends no run."""


@dataclass(frozen=True)
class BestEvaluation:
    """The evaluation with the fewest bits per byte, the first of several.

    Attributes:
        step: Its step.
        bits_per_byte: Its result.
        evaluations_since: Evaluations after it.
    """

    step: int
    bits_per_byte: float
    evaluations_since: int


def best_evaluation(rows: Iterable[Mapping[str, Any]]) -> BestEvaluation | None:
    """Return the best of some evaluations in the order of their steps; None if none after step 0 has a result."""
    best: BestEvaluation | None = None
    for row in rows:
        if row["step"] == 0:
            continue
        if is_better(row, asdict(best) if best else None):
            best = BestEvaluation(row["step"], row[BITS], 0)
        elif best is not None:
            best = BestEvaluation(best.step, best.bits_per_byte, best.evaluations_since + 1)
    return best


def patience_of(run: ResolvedRun) -> int | None:
    """Return how many evaluations in a row without a better one end a run; None: none of them ends it."""
    settings = run.spec.eval
    if settings is None or settings.patience is None:
        return None
    if isinstance(settings.patience, int):
        return settings.patience
    evaluations = math.ceil(run.steps / settings.every)
    follows = settings.keep_best and run.spec.rollout is None
    return max(LEAST_PATIENCE, math.ceil(evaluations / 2)) if follows else None


class BestFollower:
    """Follower of `eval.keep_best` and `eval.patience`; all ranks call every method together.

    Attributes:
        ends_run: `eval.patience` evaluations in a row were no better than the best.

    Args:
        run: The run.
        group: All ranks; the first one's `eval.jsonl` decides.
        checkpoints: The run's checkpoints.
    """

    def __init__(self, run: ResolvedRun, group: RankGroup, checkpoints: Checkpoints) -> None:
        self.spec, self.run, self.group, self.checkpoints = run.spec.eval, run, group, checkpoints
        self.ends_run = False
        self._step = NEVER
        self._patience = patience_of(run)

    @property
    def is_on(self) -> bool:
        """True if either setting is used."""
        return self.spec is not None and (self.spec.keep_best or self._patience is not None)

    def update(self, cursor: Cursor) -> None:
        """Read the evaluations up to a cursor again, after a resume or an evaluation."""
        if self.spec is None or not self.is_on:
            return
        file = self.run.spec.output / "eval.jsonl"
        best = best_evaluation(lines_before_step(file, cursor.step + 1)) if self.group.is_leader else None
        self._step = self.group.broadcast(best.step if best else NEVER)
        since = self.group.broadcast(best.evaluations_since if best else 0)
        self.ends_run = self._patience is not None and since >= self._patience and cursor.step < self.run.steps

    def wants_checkpoint(self, cursor: Cursor) -> bool:
        """Return True if the evaluation at a cursor is the best, whose checkpoint is to be kept."""
        return self.spec is not None and self.spec.keep_best and self._step == cursor.step

    def protect(self) -> None:
        """Protect the best evaluation's checkpoint, written or being written, from deletion while it is the best."""
        if self.spec is not None and self.spec.keep_best and self._step != NEVER:
            self.checkpoints.keep(self._step)

    def restore(self, optimizer: StudentOptimizer, cursor: Cursor) -> Cursor:
        """Load the best evaluation's checkpoint into the student, at the end of the run.

        Args:
            optimizer: Holds the weights and moments, which are overwritten.
            cursor: Position of the last weights.

        Returns:
            The position of the weights that the student now has.

        Raises:
            XtokenError: The checkpoint cannot be read.
        """
        if self.spec is None or not self.spec.keep_best or self._step in (NEVER, cursor.step):
            return cursor
        path = self.checkpoints.path_of(self._step)
        if not self.group.broadcast(int(path.is_dir())):
            log.warning("the checkpoint of the best evaluation, %s, is missing: the last weights are exported", path)
            return cursor
        state = optimizer.state()
        best = self.checkpoints.load(path, state)
        optimizer.after_restore(state)
        log.info("exporting the weights of step %d, the best evaluation", best.step)
        return best

    def summary(self, cursor: Cursor) -> dict[str, Any]:
        """Return the fields of `summary.json`: the best evaluation, and the reason of an early end."""
        if self.spec is None:
            return {}
        best = best_evaluation(lines_before_step(self.run.spec.output / "eval.jsonl", cursor.step + 1))
        early = (
            {
                "stopped_early": f"{best.evaluations_since} evaluations in a row were no better than that of step "
                f"{best.step} (eval.patience)"
            }
            if self.ends_run and best
            else {}
        )
        return {"best": asdict(best) if best else None} | early
