"""Publication of the student's weights to rollout workers, and the check that no completion is too old."""

from __future__ import annotations

import logging
import secrets

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import XtokenError
from xtoken_services.common.batches.step_plan import StepPlan
from xtoken_services.common.generation.published_weights import Version, WeightsWriter, weights_file
from xtoken_services.common.processes.worker import Worker
from xtoken_services.trainer.optimizer import StudentOptimizer
from xtoken_services.trainer.student import Student

log = logging.getLogger("xtoken.trainer")


class AveragesPublisher:
    """Publishes the moving averages of the student's weights that teachers compute with (`teacher.sync`).

    The teacher of a step waits for the average as it was after the step before. No later one can come meanwhile, since
    the step needs what it says.

    Args:
        run: The run.
        optimizer: Has the averages.
        writes: False on a rank that only takes part, if the student is sharded.
    """

    def __init__(self, run: ResolvedRun, optimizer: StudentOptimizer, *, writes: bool) -> None:
        self.steps, self.optimizer = run.steps, optimizer
        self._tag = secrets.randbits(62) + 1
        self._writers = {
            teacher: WeightsWriter(weights_file(run, teacher), on_device=True) if writes else None
            for teacher in optimizer.averages
        }

    def publish(self, step: int) -> None:
        """Publish the averages before a step; all ranks of a sharded student call.

        Args:
            step: Optimiser steps behind them.
        """
        for teacher, writer in self._writers.items():
            if step < self.steps and (writer is not None or self.optimizer.student.sharded):
                with self.optimizer.averaged(teacher):
                    weights = self.optimizer.student.full_weights(keeps=writer is not None)
                    if writer is not None:
                        writer.write(weights, Version(step, self._tag))

    def close(self) -> None:
        """Remove what was published."""
        for writer in filter(None, self._writers.values()):
            writer.close()


class WeightsPublisher:
    """Publishes versions of a run's weights; does nothing in a run without rollouts.

    Args:
        worker: The session of the rank that publishes.
        student: The student.
        writes: False on all other ranks, which take part if the student is sharded.
    """

    def __init__(self, worker: Worker, student: Student, *, writes: bool) -> None:
        self.worker, self.student = worker, student
        self.rollout = worker.run.spec.rollout
        staleness = self.rollout.max_staleness if self.rollout is not None else 0
        self._from = worker.run.prompts.after - staleness  # weights of steps before complete no prompt
        self._writer: WeightsWriter | None = None
        if self.rollout is not None and writes:
            on_device = self.rollout.weights == "auto" and self.rollout.loads_model
            self._writer = WeightsWriter(weights_file(worker.run), on_device=on_device)
        self._tag = 0

    def after_rewind(self, step: int, rewinds: int) -> None:
        """Publish the weights under a new tag; completions from `step` on are generated anew."""
        if self.rollout is None or step >= self.worker.run.steps:
            return
        if self._tag and self._writer is not None and step >= self._from:
            log.warning("the completions from step %d on are generated anew", step)
        self._tag = secrets.randbits(62) + 1
        if step >= self._from:
            self._publish(step, rewinds)

    def after_step(self, step: int, rewinds: int) -> None:
        """Publish the weights of a step's boundary if they are due.

        Args:
            step: Optimiser steps behind the weights.
            rewinds: Number of rewinds so far.
        """
        due = self._from <= step < self.worker.run.steps
        if self.rollout is not None and due and step % self.rollout.publish_every == 0:
            self._publish(step, rewinds)

    def check(self, plan: StepPlan) -> None:
        """Refuse a step with a completion by weights that are too old; the queue leases none to generate.

        Raises:
            XtokenError: There is one.
        """
        if self.rollout is not None and plan.generated.stalest > self.rollout.max_staleness:
            raise XtokenError(
                f"step {plan.step} has a completion by weights that are {plan.generated.stalest} steps old, "
                f"rollout.max_staleness is {self.rollout.max_staleness}: a rollout worker has put it without a lease"
            )

    def close(self) -> None:
        """Remove the published weights."""
        if self._writer is not None:
            self._writer.close()

    def _publish(self, step: int, rewinds: int) -> None:
        if self._writer is None and not self.student.sharded:
            return
        weights = self.student.full_weights(keeps=self._writer is not None)
        if self._writer is not None:
            self._writer.write(weights, Version(step, self._tag))
            self.worker.queue.publish(step, tag=self._tag, rewinds=rewinds)
