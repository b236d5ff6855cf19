"""The teacher's side of the protocol: micro-batch after micro-batch, strictly in plan order, one slot each."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from services.common.batches import padded_batch
from services.common.models import head_width
from services.common.steps import StepPlan, plan_fields, plan_step, ring_shape
from services.common.worker import WAIT_S, Worker
from xtoken_core import schema
from xtoken_core.data_plane.client import AlreadyDone
from xtoken_core.errors import InputError
from xtoken_core.plan import MicroBatch
from xtoken_core.teacher.signal import SignalRing
from xtoken_core.teacher.transports import create_ring
from xtoken_core.wire import QueueError
from xtoken_core.wire.messages import Claimed, Trainer

log = logging.getLogger("xtoken.teacher")


class TeacherLoop:
    """One teacher's work for one rank.

    Args:
        worker: The session.
        model: The teacher, in evaluation mode.
        teacher: Its place in the run's list.
        rank: The student rank it serves.
        pad_id: The token id that fills padding.
    """

    def __init__(self, worker: Worker, model: PreTrainedModel, *, teacher: int, rank: int, pad_id: int) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.model, self.teacher, self.rank, self.pad_id = model, teacher, rank, pad_id
        spec = self.run.spec
        shared = spec.same_tokenizer[teacher]
        index = schema.teacher_indices(len(spec.teacher))[teacher]
        self.ids_field = schema.INPUT_IDS.name if shared else schema.field_name(schema.TEACHER_INPUT_IDS, index)
        self.shape = ring_shape(self.run, teacher)
        width = head_width(model)
        if width != self.shape.head_width:
            raise InputError(
                f"teacher {teacher}: the head of {spec.teacher[teacher].model} has {width} rows, "
                f"its config.json says {self.shape.head_width}"
            )

    def serve(self) -> None:
        """Pair with trainer after trainer until the run ends."""
        while True:
            try:
                trainer = self._await_trainer()
                self._pair(trainer)
            except QueueError as error:
                if error.code == "exhausted":
                    log.info("the run is over")
                    return
                if error.code != "ring_closed":
                    raise
                log.info("%s: waiting for the next trainer", error)

    def _await_trainer(self) -> Trainer:
        while True:
            self.worker.alive()
            trainer = self.queue.await_trainer(self.rank, wait_s=WAIT_S)
            if trainer is not None:
                return trainer

    def _pair(self, trainer: Trainer) -> None:
        """Make a ring for one trainer session and fill it until that session ends."""
        spec = self.run.spec
        ring = create_ring(spec.workers.signal, self.shape, run=spec.name, session=trainer.trainer)
        try:
            number = self.queue.announce_ring(self.teacher, self.rank, trainer.trainer, ring.handle.to_bytes())
            while not self.queue.await_opened(number, wait_s=WAIT_S):
                self.worker.alive()
            ring.unlink()
            log.info("ring %d is open, %d slots", number, self.shape.slots)
            self._fill(ring, number, trainer.step, trainer.rewinds)
        finally:
            ring.close()

    def _fill(self, ring: SignalRing, number: int, step: int, rewinds: int) -> None:
        while True:
            try:
                found = self._window(step, rewinds)
                for batch in found.plan.ranks[self.rank] if found else ():
                    self._signal(ring, number, batch, rewinds)
                step += 1
            except QueueError as error:
                if error.code == "rewound":
                    step, rewinds = error.detail["step"], error.detail["rewinds"]
                    log.info("%s", error)
                elif error.code != "lease_revoked":
                    raise

    def _window(self, step: int, rewinds: int) -> StepPlan | None:
        """The plan of a step; None if it was done meanwhile."""
        while True:
            self.worker.alive()
            try:
                rows = self.queue.window(step, plan_fields(self.run), rewinds=rewinds, wait_s=WAIT_S)
            except AlreadyDone:
                return None
            if rows is not None:
                return plan_step(self.run, step, rows)

    def _signal(self, ring: SignalRing, number: int, batch: MicroBatch, rewinds: int) -> None:
        """Leave a micro-batch's signal in a slot; without the samples that turn out to be impossible."""
        while batch.ids:
            claim = self._claim(number, batch, rewinds)
            if claim is None:
                return
            claimed, tokens = claim
            foreign = (tokens >= self.shape.head_width).any(dim=1).tolist()
            if not any(foreign):
                self._forward(ring, claimed, tokens)
                self.queue.complete(claimed.lease)
                self.worker.alive(1)
                return
            bad = [sample for sample, strange in zip(claimed.ids, foreign, strict=True) if strange]
            reason = f"token ids beyond the head of teacher {self.teacher} ({self.shape.head_width} rows)"
            self.queue.nack(claimed.lease, bad, reason)

    def _claim(self, number: int, batch: MicroBatch, rewinds: int) -> tuple[Claimed, torch.Tensor] | None:
        """A micro-batch with its slot, and its padded tokens `[B, T_t]`; None if its signal is there or was read."""
        while True:
            self.worker.alive()
            try:
                claim = self.queue.claim_slot(number, batch.ids, [self.ids_field], rewinds=rewinds, wait_s=WAIT_S)
            except AlreadyDone:
                return None
            if claim is not None:
                break
        claimed, columns = claim
        tokens = padded_batch(columns, widths=batch.widths, pad_ids=[self.pad_id] * len(batch.widths))[self.ids_field]
        dead = set(claimed.dead)
        tokens[[row for row, sample in enumerate(claimed.ids) if sample in dead]] = self.pad_id
        return claimed, tokens

    def _forward(self, ring: SignalRing, claimed: Claimed, tokens: torch.Tensor) -> None:
        view = ring.slot_view(claimed.slot, rows=tokens.shape[0], width=tokens.shape[1])
        logits = self.model(input_ids=tokens.to(self.model.device), use_cache=False).logits
        view.copy_(logits)
        ring.publish(claimed.slot, claimed.generation)
