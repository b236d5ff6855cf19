"""The best evaluation of a run so far, from its `eval.jsonl`: its checkpoint is kept, and it decides an early end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.files.jsonl import lines_before_step
from xtoken_services.common.run.metric_lines import BITS, is_better, task_accuracy
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.optimizer import StudentOptimizer

log = logging.getLogger("xtoken.trainer")

NEVER = -1
LEAST_PATIENCE = 8
"""Evaluations without a better one before which `eval.patience = "half"` ends no run."""


@dataclass(frozen=True)
class BestEvaluation:
    """The evaluation with the fewest bits per byte, or by tasks with the highest accuracy; the first of several.

    Attributes:
        step: Its step.
        bits_per_byte: Its result.
        evaluations_since: Evaluations after it; by tasks those that were below it in a row.
    """

    step: int
    bits_per_byte: float
    evaluations_since: int


def best_evaluation(rows: Iterable[Mapping[str, Any]], *, by_tasks: bool = False) -> BestEvaluation | None:
    """Return the best of some evaluations in the order of their steps, see `is_better`; None if none has a result."""
    best: Mapping[str, Any] | None = None
    since = 0
    for row in rows:
        as_good = by_tasks and best is not None and task_accuracy(row) == task_accuracy(best)
        if better := is_better(row, best, by_tasks=by_tasks):
            best = row
        since = 0 if better or as_good else since + 1
    return BestEvaluation(best["step"], best[BITS], since) if best is not None else None


def patience_of(run: ResolvedRun) -> int | None:
    """Return how many evaluations in a row without a better one end a run; None: none of them ends it."""
    settings = run.spec.eval
    rollout = run.spec.rollout
    if rollout is not None and rollout.stop_when_worse is not None:
        return rollout.stop_when_worse
    if settings is None or settings.patience is None:
        return None
    if isinstance(settings.patience, int):
        return settings.patience
    evaluations = math.ceil(run.steps / settings.every)
    follows = settings.keep_best and rollout is None
    return max(LEAST_PATIENCE, math.ceil(evaluations / 2)) if follows else None


class BestFollower:
    """Follower of `eval.keep_best`, `eval.patience` and `rollout.stop_when_worse`; all ranks call a method together.

    Attributes:
        ends_run: So many evaluations in a row as `patience_of` says were no better than the best, or below it.

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
        self._by_tasks = run.spec.rollout is not None and run.spec.rollout.stop_when_worse is not None

    @property
    def is_on(self) -> bool:
        """True if one of the settings is used."""
        return self.spec is not None and (self.spec.keep_best or self._patience is not None)

    def update(self, cursor: Cursor) -> None:
        """Read the evaluations up to a cursor again, after a resume or an evaluation."""
        if self.spec is None or not self.is_on:
            return
        best = self._best(cursor) if self.group.is_leader else None
        self._step = self.group.broadcast(best.step if best else NEVER)
        since = self.group.broadcast(best.evaluations_since if best else 0)
        self.ends_run = self._patience is not None and since >= self._patience and cursor.step < self.run.steps

    def _best(self, cursor: Cursor) -> BestEvaluation | None:
        rows = lines_before_step(self.run.spec.output / "eval.jsonl", cursor.step + 1)
        return best_evaluation(rows, by_tasks=self._by_tasks)

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
        best = self._best(cursor)
        if best is None or not self.ends_run:
            return {"best": asdict(best) if best else None}
        were, setting = ("no better", "eval.patience")
        if self._by_tasks:
            were, setting = ("worse on tasks", "rollout.stop_when_worse")
        early = f"{best.evaluations_since} evaluations in a row were {were} than that of step {best.step} ({setting})"
        return {"best": asdict(best), "stopped_early": early}
