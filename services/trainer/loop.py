"""The student's side of the protocol: rewind, then window after window, each step taken only if it may be."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.common.steps import StepPlan, plan_fields, plan_step
from services.common.worker import WAIT_S, StopRequested, Worker
from services.trainer.checkpoint import Checkpoints, Cursor
from services.trainer.evaluate import Evaluator
from services.trainer.group import Group
from services.trainer.optimizer import make_optimizer, make_schedule
from services.trainer.records import JsonLines
from services.trainer.step import StepRunner
from xtoken_core.losses import combine_metrics

log = logging.getLogger("xtoken.trainer")


class TrainerLoop:
    """One rank's training.

    Args:
        worker: The session.
        model: The student.
        runner: What turns a step into gradients.
        group: All ranks.
        evaluator: Reads the held-out text; None without one.
    """

    def __init__(
        self, worker: Worker, model: PreTrainedModel, runner: StepRunner, group: Group, evaluator: Evaluator | None
    ) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.model, self.runner, self.group, self.evaluator = model, runner, group, evaluator
        spec = self.run.spec
        self.optimizer = make_optimizer(model, spec.train)
        self.schedule = make_schedule(self.optimizer, spec.train, self.run.steps)
        self.checkpoints = Checkpoints(spec.output / "checkpoints", self.run)
        self.lines = JsonLines(spec.output / "steps.jsonl")
        self.cursor = Cursor()
        self.rewinds = 0
        self._saved = -1

    def train(self) -> Cursor:
        """Train to the end of the run, from the newest checkpoint if there is one.

        Raises:
            XtokenError: A checkpoint or a record cannot be read or written.
        """
        self._restore()
        self._rewind()
        self._evaluate_if_due()
        try:
            while self.cursor.step < self.run.steps:
                self._one_step()
        except StopRequested:
            if self.cursor.step > max(self._saved, 0):
                self._save()
            raise
        if self.cursor.step > self._saved:
            self._save()
        return self.cursor

    # Recovery

    def _restore(self) -> None:
        latest = self.checkpoints.latest()
        if latest is not None:
            self.cursor, state = self.checkpoints.load(latest, self.group.device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self._saved = self.cursor.step
            log.info("going on from %s", latest)
        if self.group.leads:
            self.lines.cut_back(self.cursor.step, inclusive=False)
            if self.evaluator is not None:
                self.evaluator.lines.cut_back(self.cursor.step, inclusive=True)
        self.group.wait()

    def _rewind(self) -> None:
        """Put the queue to where this trainer stands: a fresh start, a resumed run, a step to be repeated."""
        rewinds = 0
        if self.group.leads:
            rewinds = self.queue.rewind(self.cursor.step, self.cursor.skipped, self.cursor.dead)
        self.rewinds = self.group.from_leader(rewinds)

    # One step

    def _one_step(self) -> None:
        began = time.monotonic()
        step = self._window()
        self.worker.phase("run")
        metrics = self.runner.run_step(step, self.rewinds)
        redo = self.queue.check_step(step.step, step.dead, rewinds=self.rewinds)
        if self.group.any(redo):
            log.warning("step %d is done again: a teacher or a sample was lost under it", step.step)
            self.optimizer.zero_grad(set_to_none=True)
            self._rewind()
            return
        row = self._take(step, metrics)
        self._advance(step, row, time.monotonic() - began)

    def _window(self) -> StepPlan:
        while True:
            self.worker.alive()
            rows = self.queue.window(self.cursor.step, plan_fields(self.run), rewinds=self.rewinds, wait_s=WAIT_S)
            if rows is not None:
                return plan_step(self.run, self.cursor.step, rows)

    def _take(self, step: StepPlan, metrics: list[dict[str, Tensor]]) -> dict[str, Any]:
        """The optimiser's step, if there was anything to learn; returns what to report of it."""
        if step.ce_tokens == 0 and not any(step.kd_chunks):
            self.optimizer.zero_grad(set_to_none=True)
            return {}
        spec = self.run.spec.train
        self.group.sum_gradients(self.model.parameters())
        limit = spec.grad_clip if spec.grad_clip is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**self._combined(metrics), "grad_norm": float(norm), "learning_rate": rate}

    def _combined(self, metrics: list[dict[str, Tensor]]) -> dict[str, float]:
        """The step's metrics over micro-batches and ranks."""
        parts = [part for of_rank in self.group.gather(metrics) for part in of_rank]
        return {name: float(value) for name, value in combine_metrics(parts).items()}

    def _advance(self, step: StepPlan, row: dict[str, Any], seconds: float) -> None:
        """Write the step down, acknowledge it, and do what is due at its boundary."""
        self._remember(step)
        if self.group.leads:
            if step.ids:
                self.lines.append(
                    {
                        "step": step.step,
                        "ids": list(step.ids),
                        **row,
                        "tokens": step.tokens,
                        "seconds": round(seconds, 6),
                        "tokens_per_second": round(step.tokens / seconds, 3),
                        "skipped": list(step.skipped),
                        "dead": list(step.dead),
                    }
                )
            self.queue.ack_window(step.step, rewinds=self.rewinds)
        self.group.wait()
        self.worker.alive(1)
        spec = self.run.spec
        if self.cursor.step % spec.train.checkpoint_every == 0:
            self._save()
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        """Read the held-out text every so many steps, before the first and after the last; once per step."""
        spec, step = self.run.spec, self.cursor.step
        due = spec.eval is not None and (step % spec.eval.every == 0 or step == self.run.steps)
        if due and self.evaluator is not None and self.group.leads and self.evaluator.lines.last_step() != step:
            self.evaluator.evaluate(self.model, step)
        self.group.wait()

    def _remember(self, step: StepPlan) -> None:
        cursor = self.cursor
        cursor.step = step.step + 1
        cursor.trained += len(step.ids)
        cursor.tokens += step.tokens
        cursor.truncated += step.truncated
        for state, ids, known in (("skipped", step.skipped, cursor.skipped), ("dead", step.dead, cursor.dead)):
            if ids:
                listed = self.queue.client.list_samples(
                    self.queue.partition, state, after=min(ids) - 1, limit=self.run.spec.train.samples_per_step
                )
                known.update({i: listed.reasons.get(i, "") for i in ids})

    def _save(self) -> None:
        if self.group.leads:
            self.checkpoints.save(
                self.cursor,
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "schedule": self.schedule.state_dict(),
                },
            )
        self._saved = self.cursor.step
