"""Gradients of one step: its micro-batches in plan order, each claim, forward, loss, backward, release."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.lazy_logits import Logits
from xtoken_core.losses.objective import Selection
from xtoken_core.losses.overlap import POSITIONS, overlap_ratio
from xtoken_core.losses.teacher_scores import TextNats
from xtoken_core.packing import PackedRow
from xtoken_core.plan import MicroBatch
from xtoken_core.served_requests import RequestCounts, take_requests
from xtoken_core.teacher_store.store import is_miss
from xtoken_core.transports.signal import RINGS
from xtoken_core.wire import Column
from xtoken_core.wire.messages import Claimed, SlotRef
from xtoken_services.common.batches.packed_batch import packed_batch
from xtoken_services.common.batches.padding import padded_batch
from xtoken_services.common.batches.step_plan import StepPlan
from xtoken_services.common.models.packed_attention import copied_to
from xtoken_services.common.processes.worker import WAIT_S, StopRequested, Worker
from xtoken_services.trainer.completion_samples import CompletionSamples
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.rings import TeacherRings
from xtoken_services.trainer.student import Student
from xtoken_services.trainer.timing import DeviceTimer


@dataclass(frozen=True)
class ClaimedBatch:
    """A micro-batch that this rank has claimed.

    Attributes:
        batch: The micro-batch as planned.
        data: Its columns, padded or packed.
        row: The layout of the student's packed row; None: each row is a sample.
        slots: The slot of each teacher that compares it, in their order.
    """

    batch: MicroBatch
    data: dict[str, Any]
    row: PackedRow | None
    slots: Sequence[SlotRef]


@dataclass(frozen=True)
class TeacherChoices:
    """Result of `select_teacher`.

    Attributes:
        of_batch: The choice for each micro-batch.
        chunks: Chunks of the chosen teachers over all ranks, the step's denominator.
    """

    of_batch: list[Selection]
    chunks: Tensor


class StepRunner:
    """Computes the gradients of one rank's part of a step.

    Args:
        worker: The session.
        student: The student.
        loss: The run's loss.
        rings: The teachers' rings.
        group: All ranks.
        rank: Number of this rank in its node group.
        pad_id: Token id for the student's padding.
        samples: Shows completions on the web page.
        token_bytes: Length of each of the student's tokens, if student and teachers are measured on the text.

    Attributes:
        waited_s: Seconds spent waiting for the teachers' signals, over all steps.
        stopped: This rank was asked to stop while it waited, in the last step.
        timer: Device time of forward, loss and backward.
    """

    def __init__(
        self,
        worker: Worker,
        student: Student,
        loss: CrossTokenizerDistillationLoss,
        rings: TeacherRings,
        group: RankGroup,
        *,
        rank: int,
        pad_id: int,
        samples: CompletionSamples | None = None,
        token_bytes: Tensor | None = None,
    ) -> None:
        self.samples = samples
        self._token_bytes = token_bytes
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.student, self.loss, self.rings, self.group = student, loss, rings, group
        self.rank, self.pad_id = rank, pad_id
        self.world_rank = self.run.group * self.run.spec.workers.ranks + rank
        spec = self.run.spec
        self.waited_s = 0.0
        teachers = list(enumerate(spec.teacher))
        self._stored = [number for number, teacher in teachers if teacher.store is not None]
        self._served = [number for number, teacher in teachers if teacher.store is None and teacher.url]
        self._reads = self._requests = RequestCounts()
        self.stopped = False
        self.timer = DeviceTimer(student.device)

    def run_step(
        self, step: StepPlan, rewinds: int, kl_loss_weight: float, *, measures: bool = False
    ) -> list[dict[str, Tensor]]:
        """Accumulate gradients over micro-batches (gradient accumulation); return this rank's metrics, on the device.

        On a GPU the host only enqueues work: it claims and copies a micro-batch while the previous one is computed.
        With several ranks, no rank stops alone: a rank that was asked to stop claims no further micro-batch and
        continues until all ranks decide together.

        Args:
            step: The step.
            rewinds: Of the queue.
            kl_loss_weight: Weight of the divergence.
            measures: Measure student and teachers on the text too; not with completions.

        Raises:
            StopRequested: The only rank was asked to stop.
        """
        metrics = []
        self.stopped = False
        self.timer.reset()
        # Lazily: a micro-batch is claimed when the one before it has been enqueued.
        received: Iterable[ClaimedBatch | None] = (self._claim(b, rewinds) for b in step.plan.ranks[self.rank])
        choices: TeacherChoices | None = None
        if self.loss.selects_teacher:
            received = [self._if_open(micro_batch) for micro_batch in list(received)]
            choices = self._choose(received)
        for index, micro_batch in enumerate(received):
            torch.manual_seed(seed_of(self.run.spec.seed, step.step, self.world_rank, index))
            if micro_batch is not None:
                metrics.append(self._backward(step, micro_batch, index, choices, kl_loss_weight, measures=measures))
                self.rings.release(micro_batch.slots)
                self.worker.beat(1)
            elif self.student.sharded:  # its collectives need every rank in every forward and backward
                self.student.dummy_step(self.pad_id)
        self.rings.drain()
        return metrics

    def request_metrics(self, skipped: Mapping[int, str]) -> dict[str, float | int]:
        """Return the counts of this rank's served and stored teachers since the last call; nothing without any.

        Args:
            skipped: Positions of the step that have no row, with the reason.
        """
        metrics: dict[str, float | int] = {}
        if self._stored:
            metrics = self._reads.of_store() | {"store_misses": sum(map(is_miss, skipped.values()))}
        if self._served:
            metrics |= self._requests.of_servers()
        self._reads = self._requests = RequestCounts()
        return metrics

    def _claim(self, batch: MicroBatch, rewinds: int) -> ClaimedBatch | None:
        """Lease a micro-batch, with its signals; None if it has nothing to train on, or this rank is to stop.

        While it waits it opens the rings of teachers that (re)start.
        """
        if not batch.ids or self.stopped:
            return None
        fields = self._fields(batch.teachers)

        def ask() -> tuple[Claimed, dict[str, Column]] | None:
            self.rings.poll()
            return self.queue.claim_batch(batch.ids, fields, rewinds=rewinds, wait_s=WAIT_S)

        began = time.monotonic()
        try:
            claimed, columns = self.worker.until(ask)
        except StopRequested:
            if self.run.world == 1:
                raise
            self.stopped = True
            return None
        finally:
            self.waited_s += time.monotonic() - began
        self._requests = self._requests.plus(take_requests(columns, self._served))
        self._reads = self._reads.plus(take_requests(columns, self._stored))
        if len(claimed.slots) < len(batch.teachers) or set(claimed.dead).issuperset(batch.ids):
            return None  # every sample is dead
        slots = sorted(claimed.slots, key=lambda ref: ref.teacher)
        self.rings.receive(slots, columns)
        return ClaimedBatch(batch, *self._tensors(batch, claimed, columns), slots)

    def _if_open(self, micro_batch: ClaimedBatch | None) -> ClaimedBatch | None:
        """Return the micro-batch if all its rings are still open after later claims; None otherwise.

        A claim closes the rings of teachers that have ended. The step is repeated then: `check_step` answers `redo`.
        """
        if micro_batch is None:
            return None
        open_slots = [ref for ref in micro_batch.slots if ref.ring in RINGS]
        if len(open_slots) == len(micro_batch.slots):
            return micro_batch
        self.rings.release(open_slots)
        return None

    @torch.no_grad()
    def _choose(self, received: Iterable[ClaimedBatch | None]) -> TeacherChoices:
        """Choose the teacher of every micro-batch, with all signals of the step before its first backward."""
        device = self.student.device
        of_batch = []
        for micro_batch in received:
            if micro_batch is None:
                of_batch.append(Selection.nothing(device))
            else:
                on_device = to_device(tensors_of(micro_batch.data), device)
                loss = self.loss.among(micro_batch.batch.teachers)
                of_batch.append(loss.select(on_device, self._teacher_logits(micro_batch)))
                self.worker.beat()
        chunks = sum((choice.chunks for choice in of_batch), start=torch.zeros((), device=device))  # may be empty
        return TeacherChoices(of_batch, self.group.all_reduce_sum(chunks))

    def _teacher_logits(self, micro_batch: ClaimedBatch) -> list[Logits]:
        """Return each teacher's logits `[B, T_t, V_t]`, or their factors."""
        batch = micro_batch.batch
        return [self.rings.logits(ref, batch.rows, batch.widths[1 + ref.teacher]) for ref in micro_batch.slots]

    def _backward(
        self,
        step: StepPlan,
        micro_batch: ClaimedBatch,
        index: int,
        choices: TeacherChoices | None,
        kl_loss_weight: float,
        *,
        measures: bool = False,
    ) -> dict[str, Tensor]:
        """Run forward, loss and backward of a micro-batch; no view of a teacher's memory outlives this frame."""
        device = self.student.device
        teacher_logits = self._teacher_logits(micro_batch)
        tensors = tensors_of(micro_batch.data)
        on_device = to_device(tensors, device)
        blockwise, batch = self.student.blockwise, micro_batch.batch
        objective = self.loss.among(batch.teachers, step.shares)
        samples = self.samples if self.samples is not None and self.samples.due(tensors) else None
        objective.observer = samples.observe if samples is not None else None
        text: TextNats | None = None
        if measures and self._token_bytes is not None:
            text = TextNats(objective.losses, on_device, teacher_logits, self._token_bytes)
            objective.observer = text.observe
        self.timer.start()
        outputs = self.student.outputs(on_device[schema.INPUT_IDS.name], micro_batch.row)
        self.timer.lap("forward")
        overlap: dict[str, Tensor] = {}
        if self.run.spec.rollout is not None:
            part = max(1, POSITIONS // (self.run.world * step.plan.micro_batches))
            overlap = overlap_ratio(objective.losses, tensors, outputs, teacher_logits, positions=part)
        loss, metrics = objective(
            on_device,
            outputs,
            teacher_logits,
            global_valid_toks=step.ce_tokens,
            global_valid_chunks=[step.kd_chunks[teacher] for teacher in batch.teachers],
            global_selected_chunks=choices.chunks if choices else None,
            selection=choices.of_batch[index] if choices else None,
            blocks=objective.token_blocks(tensors, [batch.widths[1 + n] for n in batch.teachers])
            if blockwise
            else None,
            kl_loss_weight=kl_loss_weight,
        )
        self.timer.lap("loss")
        del outputs  # only the graph holds them now, so that backward frees most of their memory early
        loss.backward()  # type: ignore[no-untyped-call]
        self.timer.lap("backward")
        if samples is not None:
            samples.write(step.step, tensors, batch.teachers)
        if not step.ce_tokens:
            del metrics["accuracy"]  # of no token
        for teacher in batch.teachers if step.text_of else ():
            if own := step.text_of[teacher]:  # parts of the mean over a teacher's own samples, as kl_loss_t{i} is
                metrics[f"ce_loss_t{teacher}"] = metrics["ce_loss"] * (step.ce_tokens / own)
        return metrics | overlap | (text.metrics if text is not None else {})

    def _fields(self, teachers: Collection[int]) -> list[str]:
        """Return the columns that the loss reads of samples that these teachers compare."""
        spec, same = self.run.spec, self.run.same_tokenizer
        reads = {"rollouts": spec.rollout is not None, "log_probs": spec.loss.importance_cap is not None}
        without_columns = [own or number not in teachers for number, own in enumerate(same)]
        return list(schema.run_fields(without_columns, **reads))

    def _tensors(
        self, batch: MicroBatch, claimed: Claimed, columns: dict[str, Column]
    ) -> tuple[dict[str, Any], PackedRow | None]:
        """Return a micro-batch as tensors, and the layout of the student's row if it is packed."""
        pad_ids = [self.pad_id] * len(batch.widths)
        dead = [index for index, sample in enumerate(batch.ids) if sample in claimed.dead]
        row: PackedRow | None = None
        if batch.packed:
            data, (row, *_) = packed_batch(columns, widths=batch.widths, pad_ids=pad_ids, dead_samples=dead)
        else:
            data = padded_batch(columns, widths=batch.widths, pad_ids=pad_ids, dead_rows=dead)
        for teacher, same in enumerate(self.run.same_tokenizer):
            if same:
                data[schema.field_name(schema.TEACHER_INPUT_IDS, teacher)] = data[schema.INPUT_IDS.name]
        return data, row


def tensors_of(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the columns that are tensors."""
    return {name: value for name, value in data.items() if isinstance(value, Tensor)}


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy tensors to a device without synchronisation."""
    return {name: copied_to(device, value) for name, value in tensors.items()}


def seed_of(seed: int, step: int, rank: int, micro_batch: int) -> int:
    """Return the random seed of a micro-batch: a repeated step repeats its dropout, and no state need be stored."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}/{micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
