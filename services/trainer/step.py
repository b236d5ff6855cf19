"""One optimiser step: its micro-batches in plan order, forward, loss, backward, release."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.common.batches import padded_batch
from services.common.steps import StepPlan
from services.common.worker import WAIT_S, StopRequested, Worker
from services.trainer.rings import OpenRings
from services.trainer.signals import teacher_logits
from services.trainer.stopwatch import Stopwatch
from services.trainer.student import Student
from xtoken_core import schema
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.plan import MicroBatch
from xtoken_core.protocol.run import signal_fields
from xtoken_core.wire import Column
from xtoken_core.wire.messages import Claimed


class StepRunner:
    """Gradients of one rank's part of a step.

    Args:
        worker: The session.
        student: The student.
        loss: The run's loss.
        rings: The teachers' rings.
        rank: This rank in its node group.
        pad_id: The token id that fills the student's padding.

    Attributes:
        waited_s: Seconds that it has waited for the teachers' signals, in all steps.
        left: Whether this rank was asked to leave while it waited, in the last step.
        watch: How long the device takes for forward, loss and backward.
    """

    def __init__(
        self,
        worker: Worker,
        student: Student,
        loss: CrossTokenizerDistillationLoss,
        rings: OpenRings,
        *,
        rank: int,
        pad_id: int,
    ) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.student, self.loss, self.rings = student, loss, rings
        self.rank, self.pad_id = rank, pad_id
        self.place = self.run.group * self.run.spec.workers.ranks + rank
        self.fields = list(schema.run_fields(self.run.spec.same_tokenizer))
        self.signals = signal_fields(len(self.run.spec.teacher))
        self.waited_s = 0.0
        self.left = False
        self.watch = Stopwatch(student.device)

    def run_step(self, step: StepPlan, rewinds: int) -> list[dict[str, Tensor]]:
        """Add the gradients of this rank's micro-batches; returns their metrics, on the device.

        The host only queues work for a GPU: it claims and copies a micro-batch while the one before is computed.
        Of several ranks none leaves by itself: one that was asked to claims nothing any more, but goes on to where they
        decide together.

        Raises:
            StopRequested: The only rank was asked to leave.
        """
        metrics = []
        self.left = False
        self.watch.forget()
        for index, batch in enumerate(step.plan.ranks[self.rank]):
            torch.manual_seed(seed_of(self.run.spec.seed, step.step, self.place, index))
            found = self._micro_batch(step, batch, rewinds) if batch.ids and not self.left else None
            if found is not None:
                metrics.append(found)
            elif self.student.sharded:
                self.student.stand_by(self.pad_id)
        self.rings.settle()
        return metrics

    def _micro_batch(self, step: StepPlan, batch: MicroBatch, rewinds: int) -> dict[str, Tensor] | None:
        began = time.monotonic()
        try:
            claimed, columns = self._claim(batch, rewinds)
        except StopRequested:
            if self.run.world == 1:
                raise
            self.left = True
            return None
        finally:
            self.waited_s += time.monotonic() - began
        if any(name not in columns for name in self.signals):
            return None  # every sample has died
        self.rings.receive(columns)
        data = self._padded(batch, claimed, columns)
        slots = {(ref["ring"], ref["slot"], ref["generation"]) for name in self.signals for ref in data[name]}
        metrics = self._backward(step, batch, data)
        self.rings.release(slots)
        self.worker.beat(1)
        return metrics

    def _backward(self, step: StepPlan, batch: MicroBatch, data: dict[str, Any]) -> dict[str, Tensor]:
        """Forward, loss and backward of a micro-batch; no view of a teacher's memory outlives it."""
        device = self.student.device
        signals = [teacher_logits(data, index, device) for index in schema.teacher_indices(len(self.run.spec.teacher))]
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        on_device = to_device(tensors, device)
        blockwise = self.student.blockwise
        self.watch.start()
        outputs = self.student.outputs(on_device[schema.INPUT_IDS.name])
        self.watch.lap("forward")
        loss, metrics = self.loss(
            on_device,
            outputs,
            signals,
            global_valid_toks=step.ce_tokens,
            global_valid_chunks=list(step.kd_chunks),
            blocks=self.loss.token_blocks(tensors, batch.widths[1:]) if blockwise else None,
        )
        self.watch.lap("loss")
        del outputs  # the graph alone keeps it: a large part of it goes while backward runs
        loss.backward()  # type: ignore[no-untyped-call]
        self.watch.lap("backward")
        return metrics

    def _claim(self, batch: MicroBatch, rewinds: int) -> tuple[Claimed, dict[str, Column]]:
        """Lease a micro-batch; meanwhile open the rings of teachers that come (back)."""
        while True:
            self.worker.alive()
            self.rings.look_after()
            found = self.queue.claim_batch(batch.ids, self.fields, rewinds=rewinds, wait_s=WAIT_S)
            if found is not None:
                return found

    def _padded(self, batch: MicroBatch, claimed: Claimed, columns: dict[str, Column]) -> dict[str, Any]:
        dead = set(claimed.dead)
        data = padded_batch(
            columns,
            widths=batch.widths,
            pad_ids=[self.pad_id] * len(batch.widths),
            dead_rows=[row for row, sample in enumerate(batch.ids) if sample in dead],
        )
        indices = schema.teacher_indices(len(self.run.spec.teacher))
        for index, same in zip(indices, self.run.spec.same_tokenizer, strict=True):
            if same:
                data[schema.field_name(schema.TEACHER_INPUT_IDS, index)] = data[schema.INPUT_IDS.name]
        return data


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies on a device; a GPU gets them through pinned memory, without waiting for what it still computes."""
    if device.type != "cuda":
        return {name: value.to(device) for name, value in tensors.items()}
    return {name: value.pin_memory().to(device, non_blocking=True) for name, value in tensors.items()}


def seed_of(seed: int, step: int, rank: int, micro_batch: int) -> int:
    """The random state of a micro-batch, so that a repeated step repeats its dropout and none need be stored."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}/{micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
