"""The training loop: rewind, then per window forward, backward, `check_step`, optimiser step and acknowledgement."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from typing import Any

from torch import Tensor

from xtoken_core.errors import ConfigError
from xtoken_core.losses import combine_metrics
from xtoken_services.common.batches.step_plan import StepPlan, plan_fields, plan_step
from xtoken_services.common.files.jsonl import JsonLines, replace_file
from xtoken_services.common.processes.worker import WAIT_S, StopRequested, Worker
from xtoken_services.common.run.metric_lines import unreachable_warnings
from xtoken_services.common.run.resume import CHECKPOINTS, RESOLVED
from xtoken_services.trainer.best import BestFollower
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.distributed import RankGroup, StepOutcome, own_positions, reduce_plan, step_outcome
from xtoken_services.trainer.evaluate import Evaluator
from xtoken_services.trainer.kd_weight import KdWeight
from xtoken_services.trainer.loggers import MetricLogger, make_loggers
from xtoken_services.trainer.metrics import flops_per_token, kl_fraction, peak_flops, peak_memory, to_floats
from xtoken_services.trainer.optimizer import StudentOptimizer
from xtoken_services.trainer.publish import AveragesPublisher, WeightsPublisher
from xtoken_services.trainer.step import StepRunner
from xtoken_services.trainer.student import Student
from xtoken_services.trainer.timing import DeviceTimer

log = logging.getLogger("xtoken.trainer")

MAX_NONFINITE_STEPS = 5
"""Consecutive steps without a finite loss and gradient that end a run."""
STEP_GRACE_S = 10.0
"""How long ranks that were asked to stop may take to finish their step."""


class TrainerLoop:
    """One rank's training.

    Args:
        worker: The session.
        student: The student.
        runner: Computes the gradients of a step.
        group: All ranks.
        evaluator: Evaluates on held-out text; None without any.
    """

    def __init__(
        self, worker: Worker, student: Student, runner: StepRunner, group: RankGroup, evaluator: Evaluator | None
    ) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.student, self.runner, self.group, self.evaluator = student, runner, group, evaluator
        spec = self.run.spec
        self.optimizer = StudentOptimizer(
            student, spec.train, self.run.steps, restart=self.run.restart, decays=spec.sync_decays
        )
        self.averages = AveragesPublisher(self.run, self.optimizer, writes=group.is_node_leader)
        self.checkpoints = Checkpoints(spec.output / CHECKPOINTS, self.run, group)
        self.best = BestFollower(self.run, group, self.checkpoints)
        self.kd_weight = KdWeight(self.run, group)
        self.publisher = WeightsPublisher(worker, student, writes=group.is_leader)
        self.lines = JsonLines(spec.output / "steps.jsonl")
        self.loggers: list[MetricLogger] = []
        self.cursor = Cursor()
        self.rewinds = 0
        self._saved, self._saved_at = -1, time.monotonic()
        self._warned: set[str] = set()
        self._flops_per_token = flops_per_token(student)
        self._peak_flops = peak_flops(student.device)
        self._optimizer_timer = DeviceTimer(student.device)
        self._stop_requested = worker.stopping
        if group.size > 1:  # several ranks stop together, at a step's boundary
            worker.stopping = threading.Event()
            threading.Thread(target=self._stop_late, args=(worker.stopping,), name="stop", daemon=True).start()

    def train(self) -> Cursor:
        """Train to the end of the run, from the newest checkpoint if there is one.

        Returns:
            The position of the student's weights: the last step, or the best evaluation's with `eval.keep_best`.
            `cursor` has the run's.

        Raises:
            XtokenError: A checkpoint or a log file cannot be read or written.
        """
        self._restore()
        if self.group.is_leader:  # for `xtoken export`; `xtoken run` has written the same
            replace_file(self.run.spec.output / RESOLVED, json.dumps(self.run.model_dump(mode="json"), indent=2) + "\n")
        self._rewind()
        self.loggers = make_loggers(self.run, self.cursor.step) if self.group.is_leader else []
        try:
            self._evaluate_if_due()
            while self.cursor.step < self.run.steps and not self.best.ends_run:
                self._one_step()
            if self.cursor.step > self._saved:
                self._save()
            if self.best.ends_run:
                log.info("ending the run early, after step %d", self.cursor.step)
                self._rewind()  # to the end: collators and teachers see that nothing is left to do
        except StopRequested:
            if self.cursor.step > max(self._saved, 0):
                self._save()
            self.checkpoints.wait()
            raise
        finally:
            self.publisher.close()
            self.averages.close()
            for logger in self.loggers:
                logger.close()
        self.checkpoints.wait()
        return self.best.restore(self.optimizer, self.cursor)

    def _stop_late(self, stop: threading.Event) -> None:
        """Stop this rank's waits if no step boundary comes, because the teachers have stopped first."""
        self._stop_requested.wait()
        time.sleep(STEP_GRACE_S)
        stop.set()

    # Recovery

    def _restore(self) -> None:
        latest = self.checkpoints.latest()
        state = self.optimizer.state()
        if latest is not None:
            self.cursor = self.checkpoints.load(latest, state)
            self.optimizer.after_restore(state)
            self._saved, self._saved_at = self.cursor.step, time.monotonic()
            log.info("resuming from %s", latest)
        self.checkpoints.stage.prepare(state)
        if self.group.is_leader:
            self.lines.truncate(self.cursor.step, inclusive=False)
            if self.evaluator is not None:
                self.evaluator.lines.truncate(self.cursor.step, inclusive=latest is not None)
        self.group.barrier()
        self.best.update(self.cursor)
        self.best.protect()
        self.kd_weight.update(self.cursor.step)

    def _rewind(self) -> None:
        """Rewind the queue to this trainer's cursor: at a start, a resume and before a step is repeated.

        A run that has ended early leaves the rest of its positions out: the queue is set to the end.
        """
        rewinds = 0
        if self.group.is_node_leader:
            skipped, dead = own_positions(self.cursor.skipped, self.run), own_positions(self.cursor.dead, self.run)
            step = self.run.steps if self.best.ends_run else self.cursor.step
            rewinds = self.queue.rewind(step, skipped, dead)
        self.rewinds = self.group.broadcast_in_node(rewinds)
        if not self.best.ends_run:
            self.publisher.after_rewind(self.cursor.step, self.rewinds)
            self.checkpoints.stage.wait()  # the averages take the weights' place for a moment
            self.averages.publish(self.cursor.step)

    # One step

    def _one_step(self) -> None:
        began = time.monotonic()
        step = reduce_plan(self._window(), self.group)
        self.publisher.check(step)
        waits = {"data_wait": time.monotonic() - began, "teacher_wait": -self.runner.waited_s}
        self.worker.phase("run")
        measures = self.kd_weight.measures(step.step)
        metrics = self.runner.run_step(step, self.rewinds, self.kd_weight.at(step.step), measures=measures)
        waits["teacher_wait"] += self.runner.waited_s
        stopped = self.runner.stopped
        redo = stopped or self.queue.check_step(step.step, step.dead, rewinds=self.rewinds)
        redo, stops = self.group.any_of(redo, stopped or self._stop_requested.is_set())
        if redo:
            self.optimizer.zero_grad()
            if stops:
                raise StopRequested
            log.warning("repeating step %d: a teacher or a sample was lost during it", step.step)
            self._rewind()
            return
        row = self._optimizer_step(step, metrics)
        self._advance(step, row, waits, time.monotonic() - began)

    def _window(self) -> StepPlan:
        """Return this node group's plan of the next step; all ranks get one, or all stop.

        Raises:
            StopRequested: Some rank was asked to stop.
        """
        plan: StepPlan | None = None
        try:
            step, fields = self.cursor.step, plan_fields(self.run)
            rows = self.worker.until(lambda: self.queue.window(step, fields, rewinds=self.rewinds, wait_s=WAIT_S))
            plan = plan_step(self.run, step, rows)
        except StopRequested:
            plan = None
        if self.group.any(plan is None) or plan is None:
            raise StopRequested
        return plan

    def _optimizer_step(self, step: StepPlan, metrics: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Take the optimiser step, unless there is no valid token or no finite gradient; returns its metrics."""
        if step.ce_tokens == 0 and not any(step.kd_chunks):
            self.optimizer.zero_grad()
            return {}
        if not self.student.sharded:
            self.group.all_reduce_gradients(self.optimizer.weights.values())
        *parts, last = to_floats([*metrics, {"grad_norm": self.optimizer.clip()}])
        row = combine_metrics(part for of_rank in self.group.all_gather(parts) for part in of_rank) | last
        row |= kl_fraction(row, self.run.spec.loss)
        if not (math.isfinite(row.get("loss", 0.0)) and math.isfinite(row["grad_norm"])):
            self._skip_nonfinite(step, row)
            return {**row, "nonfinite": True}
        # The optimiser's time is that of the step before: this step's kernels have only been enqueued.
        split = self.runner.timer.collect() | self._optimizer_timer.collect()
        self.checkpoints.stage.wait()  # the host copy of a checkpoint must see the weights of before
        self._optimizer_timer.start()
        rate = self.optimizer.step(step.step)
        self._optimizer_timer.lap("optimizer")
        self.cursor.updates += 1
        self.cursor.nonfinite_in_a_row = 0
        return {**row, "learning_rate": rate, **{f"{part}_seconds": round(s, 6) for part, s in split.items()}}

    def _skip_nonfinite(self, step: StepPlan, row: dict[str, Any]) -> None:
        """Clear the gradients of a step whose loss or gradient is not finite, and count it."""
        self.optimizer.zero_grad()
        self.cursor.nonfinite += 1
        self.cursor.nonfinite_in_a_row += 1
        log.warning(
            "skipping step %d: its loss is %g, its gradient norm %g; %d so far, %d in a row",
            step.step,
            row.get("loss", 0.0),
            row["grad_norm"],
            self.cursor.nonfinite,
            self.cursor.nonfinite_in_a_row,
        )

    def _advance(self, step: StepPlan, row: dict[str, Any], waits: dict[str, float], seconds: float) -> None:
        """Log and acknowledge the step, then checkpoint and evaluate if due."""
        outcome = step_outcome(step, self.group, self.queue)
        self._update_cursor(step, outcome)
        self.kd_weight.after_step(step.step, row)
        if self.group.is_leader and outcome.ids:
            self._log_step(step, outcome, row, waits, seconds)
        if self.group.is_node_leader:
            self.queue.ack_window(step.step, rewinds=self.rewinds)
        self.publisher.after_step(self.cursor.step, self.rewinds)
        self.averages.publish(self.cursor.step)
        spec = self.run.spec
        if self.cursor.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
            raise ConfigError(
                f"{self.cursor.nonfinite_in_a_row} steps in a row (the last: {step.step}) had no finite loss or "
                "gradient and were skipped: lower train.learning_rate and start the run "
                "again, or begin another one, of another student.dtype"
            )
        late = time.monotonic() - self._saved_at >= 60 * (spec.train.checkpoint_minutes or math.inf)
        stops, late = self.group.any_of(self._stop_requested.is_set(), late)
        self.worker.alive(1)
        if stops and self.group.size > 1:
            raise StopRequested
        self.checkpoints.check()
        if late or self.cursor.step % spec.train.checkpoint_every == 0:
            self._save()
        self._evaluate_if_due()

    def _log_step(
        self, step: StepPlan, outcome: StepOutcome, row: dict[str, Any], waits: dict[str, float], seconds: float
    ) -> None:
        line = {
            "step": step.step,
            "ids": list(outcome.ids),
            **row,
            **step.generated.metrics(),
            **{f"samples_t{teacher}": count for teacher, count in enumerate(step.samples_of)},
            "tokens": step.tokens,
            "time": round(time.time(), 6),
            "seconds": round(seconds, 6),
            "tokens_per_second": round(step.tokens / seconds, 3),
            "padding": round(step.padding, 6),
            **{name: round(wait / seconds, 6) for name, wait in waits.items()},
            **self.runner.request_metrics(outcome.skipped),
            "memory_peak_bytes": peak_memory(self.student.device),
            "skipped": list(outcome.skipped),
            "dead": list(outcome.dead),
            "skipped_total": len(self.cursor.skipped),
            "truncated_total": self.cursor.truncated,
        }
        if self._peak_flops is not None:
            flops = self._flops_per_token * step.tokens
            line["mfu"] = round(flops / (seconds * self._peak_flops * self.group.size), 6)
        self.lines.append(line)
        warnings = unreachable_warnings(row)
        for name in warnings.keys() - self._warned:
            log.warning("%s", warnings[name])
        self._warned |= warnings.keys()
        for logger in self.loggers:
            logger.log("train", step.step, line)

    def _evaluate_if_due(self) -> None:
        """Evaluate every `eval.every` steps, before the first and after the last, unless `eval.jsonl` has the step."""
        spec, step = self.run.spec, self.cursor.step
        due = spec.eval is not None and (step % spec.eval.every == 0 or step == self.run.steps)
        if due and self.evaluator is not None:
            done = self.group.broadcast(int(self.evaluator.lines.last_step() == step))
            if not done and (self.student.sharded or self.group.is_leader):
                row = self.evaluator.evaluate(self.student, step, writes=self.group.is_leader)
                for logger in self.loggers:
                    logger.log("eval", step, row or {})
            self.group.barrier()
            self.best.update(self.cursor)
            self.kd_weight.update(step)
            if self.best.wants_checkpoint(self.cursor):
                if self._saved != step:
                    self._save()
                self.best.protect()

    def _update_cursor(self, step: StepPlan, outcome: StepOutcome) -> None:
        cursor = self.cursor
        cursor.step = step.step + 1
        cursor.trained += len(outcome.ids)
        cursor.tokens += step.tokens
        cursor.truncated += step.truncated
        cursor.skipped.update(outcome.skipped)
        cursor.dead.update(outcome.dead)
        if self.group.nodes > 1 and len(cursor.dead) > self.run.spec.queue.max_dead:  # a queue counts its own only
            ids = ", ".join(map(str, sorted(cursor.dead)[:20]))
            allowed = self.run.spec.queue.max_dead
            self.queue.give_up(f"{len(cursor.dead)} dead letters in all node groups, {allowed} are allowed: {ids}")

    def _save(self) -> None:
        self.checkpoints.save(self.cursor, self.optimizer.state())
        self._saved, self._saved_at = self.cursor.step, time.monotonic()
