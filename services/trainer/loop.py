"""The student's side of the protocol: rewind, then window after window, each step taken only if it may be."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from typing import Any

from torch import Tensor

from services.common.resume import CHECKPOINTS, RESOLVED
from services.common.step_plan import StepPlan, plan_fields, plan_step
from services.common.worker import WAIT_S, StopRequested, Worker
from services.trainer.checkpoint import Checkpoints, Cursor
from services.trainer.distributed import Group
from services.trainer.evaluate import Evaluator
from services.trainer.jsonl import JsonLines, replace_file
from services.trainer.loggers import Report, make_reports
from services.trainer.metrics import floats, flops_per_token, peak_flops, peak_memory
from services.trainer.node_reduce import Account, account_of, joined, owned
from services.trainer.optimizer import StudentOptimizer
from services.trainer.step import StepRunner
from services.trainer.student import Student
from services.trainer.timing import Stopwatch
from xtoken_core.errors import ConfigError
from xtoken_core.losses import combine_metrics

log = logging.getLogger("xtoken.trainer")

TOGETHER_S = 10.0
"""How long several ranks that were asked to leave go on with the step that they are at."""


class TrainerLoop:
    """One rank's training.

    Args:
        worker: The session.
        student: What is trained.
        runner: What turns a step into gradients.
        group: All ranks.
        evaluator: Reads the held-out text; None without one.
    """

    def __init__(
        self, worker: Worker, student: Student, runner: StepRunner, group: Group, evaluator: Evaluator | None
    ) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.student, self.runner, self.group, self.evaluator = student, runner, group, evaluator
        spec = self.run.spec
        self.optimizer = StudentOptimizer(student, spec.train, self.run.steps)
        self.checkpoints = Checkpoints(spec.output / CHECKPOINTS, self.run, group)
        self.lines = JsonLines(spec.output / "steps.jsonl")
        self.reports: list[Report] = []
        self.cursor = Cursor()
        self.rewinds = 0
        self._saved = -1
        self._flops_per_token = flops_per_token(student)
        self._peak_flops = peak_flops(student.device, spec.report.peak_tflops)
        self._optimizing = Stopwatch(student.device)
        self._asked = worker.stopping
        if group.size > 1:  # several ranks leave together, at a step's boundary
            worker.stopping = threading.Event()
            threading.Thread(target=self._leave_alone, args=(worker.stopping,), name="leave", daemon=True).start()

    def train(self) -> Cursor:
        """Train to the end of the run, from the newest checkpoint if there is one.

        Raises:
            XtokenError: A checkpoint or a record cannot be read or written.
        """
        self._restore()
        if self.group.leads:  # an export needs it; `xtoken run` has written the same already
            replace_file(self.run.spec.output / RESOLVED, json.dumps(self.run.model_dump(mode="json"), indent=2) + "\n")
        self._rewind()
        self.reports = make_reports(self.run, self.cursor.step) if self.group.leads else []
        try:
            self._evaluate_if_due()
            while self.cursor.step < self.run.steps:
                self._one_step()
            if self.cursor.step > self._saved:
                self._save()
        except StopRequested:
            if self.cursor.step > max(self._saved, 0):
                self._save()
            self.checkpoints.settle()
            raise
        finally:
            for report in self.reports:
                report.close()
        self.checkpoints.settle()
        return self.cursor

    def _leave_alone(self, leave: threading.Event) -> None:
        """Wait for nothing any more, if no boundary comes because the teachers have left first."""
        self._asked.wait()
        time.sleep(TOGETHER_S)
        leave.set()

    # Recovery

    def _restore(self) -> None:
        latest = self.checkpoints.latest()
        state = self.optimizer.state()
        if latest is not None:
            self.cursor = self.checkpoints.load(latest, state)
            self.optimizer.restored(state)
            self._saved = self.cursor.step
            log.info("going on from %s", latest)
        self.checkpoints.stage.prepare(state)
        if self.group.leads:
            self.lines.cut_back(self.cursor.step, inclusive=False)
            if self.evaluator is not None:
                self.evaluator.lines.cut_back(self.cursor.step, inclusive=True)
        self.group.wait()

    def _rewind(self) -> None:
        """Put the queue to where this trainer stands: a fresh start, a resumed run, a step to be repeated."""
        rewinds = 0
        if self.group.leads_node:
            skipped, dead = owned(self.cursor.skipped, self.run), owned(self.cursor.dead, self.run)
            rewinds = self.queue.rewind(self.cursor.step, skipped, dead)
        self.rewinds = self.group.from_node_leader(rewinds)

    # One step

    def _one_step(self) -> None:
        began = time.monotonic()
        step = joined(self._window(), self.group)
        waits = {"data_wait": time.monotonic() - began, "teacher_wait": -self.runner.waited_s}
        self.worker.phase("run")
        metrics = self.runner.run_step(step, self.rewinds)
        waits["teacher_wait"] += self.runner.waited_s
        left = self.runner.left
        redo = left or self.queue.check_step(step.step, step.dead, rewinds=self.rewinds)
        redo, stops = self.group.any_of(redo, left or self._asked.is_set())
        if redo:
            self.optimizer.drop_gradients()
            if stops:
                raise StopRequested
            log.warning("step %d is done again: a teacher or a sample was lost under it", step.step)
            self._rewind()
            return
        row = self._take(step, metrics)
        self._advance(step, row, waits, time.monotonic() - began)

    def _window(self) -> StepPlan:
        """This node group's share of the next step; all ranks get one, or all leave."""
        found: StepPlan | None = None
        try:
            while found is None:
                self.worker.alive()
                rows = self.queue.window(self.cursor.step, plan_fields(self.run), rewinds=self.rewinds, wait_s=WAIT_S)
                found = plan_step(self.run, self.cursor.step, rows) if rows is not None else None
        except StopRequested:
            found = None
        if self.group.any(found is None) or found is None:
            raise StopRequested
        return found

    def _take(self, step: StepPlan, metrics: list[dict[str, Tensor]]) -> dict[str, Any]:
        """The optimiser's step, if there was anything finite to learn; returns what to report of it."""
        if step.ce_tokens == 0 and not any(step.kd_chunks):
            self.optimizer.drop_gradients()
            return {}
        if not self.student.sharded:
            self.group.sum_gradients(self.optimizer.weights.values())
        *parts, last = floats([*metrics, {"grad_norm": self.optimizer.clip()}])
        row = combine_metrics(part for of_rank in self.group.gather(parts) for part in of_rank) | last
        if not (math.isfinite(row.get("loss", 0.0)) and math.isfinite(row["grad_norm"])):
            self._leave_out(step, row)
            return {**row, "nonfinite": True}
        split = self.runner.watch.take() | self._optimizing.take()  # the optimiser's of the step before: this one runs
        self.checkpoints.stage.wait()
        self._optimizing.start()
        rate = self.optimizer.step(self.cursor.updates)
        self._optimizing.lap("optimizer")
        self.cursor.updates += 1
        self.cursor.nonfinite_in_a_row = 0
        return {**row, "learning_rate": rate, **{f"{part}_seconds": round(s, 6) for part, s in split.items()}}

    def _leave_out(self, step: StepPlan, row: dict[str, Any]) -> None:
        """Count a step whose loss or gradient is no finite number, and forget it."""
        self.optimizer.drop_gradients()
        self.cursor.nonfinite += 1
        self.cursor.nonfinite_in_a_row += 1
        log.warning(
            "step %d is left out: its loss is %g, its gradient's norm %g; %d so far, %d in a row",
            step.step,
            row.get("loss", 0.0),
            row["grad_norm"],
            self.cursor.nonfinite,
            self.cursor.nonfinite_in_a_row,
        )

    def _advance(self, step: StepPlan, row: dict[str, Any], waits: dict[str, float], seconds: float) -> None:
        """Write the step down, acknowledge it, and do what is due at its boundary."""
        account = account_of(step, self.group, self.queue)
        self._remember(step, account)
        if self.group.leads and account.ids:
            self._report(step, account, row, waits, seconds)
        if self.group.leads_node:
            self.queue.ack_window(step.step, rewinds=self.rewinds)
        spec = self.run.spec
        if self.cursor.nonfinite_in_a_row >= spec.train.max_nonfinite_steps:
            raise ConfigError(
                f"{self.cursor.nonfinite_in_a_row} steps in a row (the last: {step.step}) had no finite loss or "
                "gradient and were left out (train.max_nonfinite_steps): lower train.learning_rate and start the run "
                "again, or begin another one, of another student.dtype"
            )
        stops = self.group.any(self._asked.is_set())
        self.worker.alive(1)
        if stops and self.group.size > 1:
            raise StopRequested
        self.checkpoints.check()
        if self.cursor.step % spec.train.checkpoint_every == 0:
            self._save()
        self._evaluate_if_due()

    def _report(
        self, step: StepPlan, account: Account, row: dict[str, Any], waits: dict[str, float], seconds: float
    ) -> None:  # fmt: skip
        line = {
            "step": step.step,
            "ids": list(account.ids),
            **row,
            "tokens": step.tokens,
            "time": round(time.time(), 6),
            "seconds": round(seconds, 6),
            "tokens_per_second": round(step.tokens / seconds, 3),
            **{name: round(waited / seconds, 6) for name, waited in waits.items()},
            "memory_peak_bytes": peak_memory(self.student.device),
            "skipped": list(account.skipped),
            "dead": list(account.dead),
        }
        if self._peak_flops is not None:
            done = self._flops_per_token * step.tokens
            line["mfu"] = round(done / (seconds * self._peak_flops * self.group.size), 6)
        self.lines.append(line)
        for report in self.reports:
            report.tell("train", step.step, line)

    def _evaluate_if_due(self) -> None:
        """Read the held-out text every so many steps, before the first and after the last; once per step."""
        spec, step = self.run.spec, self.cursor.step
        due = spec.eval is not None and (step % spec.eval.every == 0 or step == self.run.steps)
        if due and self.evaluator is not None:
            known = self.group.from_leader(int(self.evaluator.lines.last_step() == step))
            if not known and (self.student.sharded or self.group.leads):
                row = self.evaluator.evaluate(self.student, step, leads=self.group.leads)
                for report in self.reports:
                    report.tell("eval", step, row or {})
            self.group.wait()

    def _remember(self, step: StepPlan, account: Account) -> None:
        cursor = self.cursor
        cursor.step = step.step + 1
        cursor.trained += len(account.ids)
        cursor.tokens += step.tokens
        cursor.truncated += step.truncated
        cursor.skipped.update(account.skipped)
        cursor.dead.update(account.dead)
        if self.group.nodes > 1 and len(cursor.dead) > self.run.spec.queue.max_dead:  # a queue counts its own only
            ids = ", ".join(map(str, sorted(cursor.dead)[:20]))
            allowed = self.run.spec.queue.max_dead
            self.queue.give_up(f"{len(cursor.dead)} dead letters in all node groups, {allowed} are allowed: {ids}")

    def _save(self) -> None:
        self.checkpoints.save(self.cursor, self.optimizer.state())
        self._saved = self.cursor.step
