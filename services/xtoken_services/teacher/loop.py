"""The teacher's main loop: micro-batches strictly in plan order, one slot each."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from xtoken_core import schema
from xtoken_core.data_plane.queue_client import AlreadyDone
from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_core.packing import PackedRow
from xtoken_core.plan import MicroBatch
from xtoken_core.served_requests import requests_field
from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
from xtoken_core.transports.factory import create_ring
from xtoken_core.transports.queue_signal import TRANSPORT as QUEUE
from xtoken_core.transports.signal import SignalRing
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire.messages import Claimed, Trainer
from xtoken_services.common.batches.packed_batch import padded_row, row_of_side, values_of
from xtoken_services.common.batches.padding import padded_batch
from xtoken_services.common.batches.step_plan import StepPlan, plan_fields, plan_step, ring_shape, topk_settings
from xtoken_services.common.http_engine.errors import SampleRefusedError
from xtoken_services.common.http_engine.scores import PromptScores
from xtoken_services.common.processes.event_callbacks import EventCallbacks
from xtoken_services.common.processes.worker import WAIT_S, Worker
from xtoken_services.teacher.model import TeacherModel
from xtoken_services.teacher.served import ServedTeacher
from xtoken_services.teacher.stored import StoredTeacher

log = logging.getLogger("xtoken.teacher")


@dataclass(frozen=True)
class ClaimedTokens:
    """A leased micro-batch and what the model reads of it.

    Attributes:
        claimed: The lease, with its slot.
        ids: `[B, T_t]` token ids, padded.
        row: The layout of a packed row; None: each row is a sample.
        lengths: Tokens of each sample.
    """

    claimed: Claimed
    ids: torch.Tensor
    row: PackedRow | None
    lengths: tuple[int, ...]

    def of_samples(self) -> list[torch.Tensor]:
        """Return each sample's token ids, with the padding of a row of its own."""
        return list(self.ids) if self.row is None else [self.ids[0, part] for part in self.row.slices()]

    def parts(self) -> list[tuple[int, slice]]:
        """Return row and tokens of each sample."""
        if self.row is not None:
            return [(0, part) for part in self.row.slices()]
        return [(row, slice(0, length)) for row, length in enumerate(self.lengths)]


class RefusedSamplesError(XtokenError):
    """A teacher cannot take some samples of a micro-batch.

    Attributes:
        samples: Their positions.
    """

    def __init__(self, samples: list[int], reason: str) -> None:
        super().__init__(reason)
        self.samples = samples


@dataclass(frozen=True)
class Pair:
    """A teacher's state for one trainer session.

    Attributes:
        ring: The ring of slots.
        number: The queue's number of the ring.
        completions: Marks a slot as full and completes its lease once the device has written it.
    """

    ring: SignalRing
    number: int
    completions: EventCallbacks


class TeacherLoop:
    """Serves one teacher to one rank of the trainer.

    Args:
        worker: The session.
        model: The teacher.
        transport: Transport of the signal, from `pick_transport`.
        teacher: Number of the teacher.
        rank: Rank of the trainer that it serves.
        pad_id: Token id for padding.
    """

    def __init__(
        self,
        worker: Worker,
        model: TeacherModel | ServedTeacher | StoredTeacher,
        transport: str,
        *,
        teacher: int,
        rank: int,
        pad_id: int,
    ) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.model, self.transport = model, transport
        self.teacher, self.rank, self.pad_id = teacher, rank, pad_id
        spec = self.run.spec
        self.name = spec.teacher_name(teacher)
        shared = self.run.same_tokenizer[teacher]
        self.ids_field = schema.INPUT_IDS.name if shared else schema.field_name(schema.TEACHER_INPUT_IDS, teacher)
        self.shape = ring_shape(self.run, teacher)
        directory, width = spec.teacher[teacher].model, model.head_width
        if width != self.shape.head_width:
            raise InputError(
                f"{self.name}: the head of {directory} has {width} rows, its config.json says {self.shape.head_width}"
            )
        if self.shape.hidden and not model.plain_head:
            raise ConfigError(
                f'teacher.{teacher}.content = "hidden": the logits of {directory} are not just hidden states times '
                'head: let it send logits (teacher.content = "logits" or "topk")'
            )

    def serve(self) -> None:
        """Serve one trainer session after another until the run ends."""
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
        """Create a ring for one trainer session and fill it until that session ends."""
        spec = self.run.spec
        ring = create_ring(self.transport, self.shape, run=spec.name, session=trainer.trainer, device=self.model.device)
        limit = spec.workers.hang_timeout_s
        completions = EventCallbacks(self.model.device, f"completions of {self.name}", limit_s=limit)
        try:
            with self._head_in(ring):
                number = self.queue.announce_ring(self.teacher, self.rank, trainer.trainer, ring.handle.to_bytes())
                while not self.queue.await_opened(number, wait_s=WAIT_S):
                    self.worker.alive()
                ring.unlink()
                log.info("ring %d is open, %d slots in %s", number, self.shape.slots, self.transport)
                self._fill(Pair(ring, number, completions), trainer.step, trainer.rewinds)
        finally:
            completions.close()
            ring.close()
            self._log_memory()

    def _head_in(self, ring: SignalRing) -> AbstractContextManager[None]:
        """Copy the head into a ring of hidden states that the trainer maps; without a map it loads its own copy."""
        if not self.shape.hidden or self.transport == QUEUE:
            return nullcontext()
        assert not isinstance(self.model, ServedTeacher), "a server gives largest logits"
        return self.model.head_in(ring.head_view())

    def _log_memory(self) -> None:
        """Log GPU memory: tensors, the weights among them, and the ring, which is outside torch's allocator."""
        device = self.model.device
        if device.type == "cuda":
            peak, ring = torch.cuda.max_memory_allocated(device), self.shape.memory_bytes
            on_gpu = ring if self.transport == CUDA_IPC else 0
            log.info("memory at most %d bytes, %d of them weights; ring %d bytes", peak, self.model.nbytes, on_gpu)

    def _fill(self, pair: Pair, step: int, rewinds: int) -> None:
        while True:
            try:
                plan = self._window(pair, step, rewinds)
                for batch in plan.plan.ranks[self.rank] if plan else ():
                    self._signal(pair, batch, rewinds)
                step += 1
            except QueueError as error:
                step, rewinds = self._after(error, step, rewinds)
                self._drain(pair)

    def _after(self, error: QueueError, step: int, rewinds: int) -> tuple[int, int]:
        """Return the (step, rewinds) to resume from after a rejected request."""
        if error.code == "rewound":
            log.info("%s", error)
            return error.detail["step"], error.detail["rewinds"]
        if error.code != "lease_revoked":
            raise error
        return step, rewinds

    def _drain(self, pair: Pair) -> None:
        """Wait for pending completions before the step is repeated; refusals of revoked leases are ignored."""
        while True:
            try:
                pair.completions.drain()
                return
            except QueueError as error:
                if error.code not in ("lease_revoked", "rewound"):
                    raise

    def _window(self, pair: Pair, step: int, rewinds: int) -> StepPlan | None:
        """Return the plan of a step; None if it was done meanwhile."""
        while True:
            self.worker.alive()
            pair.completions.check()
            try:
                rows = self.queue.window(step, plan_fields(self.run), rewinds=rewinds, wait_s=WAIT_S)
            except AlreadyDone:
                return None
            if rows is not None:
                return plan_step(self.run, step, rows)

    def _signal(self, pair: Pair, batch: MicroBatch, rewinds: int) -> None:
        """Write a micro-batch's signal into a slot, after a nack of samples that this teacher cannot take."""
        while batch.ids:
            claim = self._claim(pair, batch, rewinds)
            if claim is None:
                return
            try:
                self._check_ids(claim)
                self._forward(pair, claim)
            except RefusedSamplesError as error:
                self.queue.nack(claim.claimed.lease, error.samples, str(error))
            else:
                self.worker.alive(1)
                return

    def _check_ids(self, claim: ClaimedTokens) -> None:
        """Refuse samples with tokens that the teacher does not have.

        Raises:
            RefusedSamplesError: There are some.
        """
        beyond_head = [bool((ids >= self.shape.head_width).any()) for ids in claim.of_samples()]
        if any(beyond_head):
            bad = [sample for sample, is_beyond in zip(claim.claimed.ids, beyond_head, strict=True) if is_beyond]
            reason = f"token ids beyond the head of {self.name} ({self.shape.head_width} rows)"
            raise RefusedSamplesError(bad, reason)

    def _claim(self, pair: Pair, batch: MicroBatch, rewinds: int) -> ClaimedTokens | None:
        """Claim a micro-batch with a slot, and pad its tokens; None if its signal exists or was read."""
        while True:
            self.worker.alive()
            pair.completions.check()
            try:
                claim = self.queue.claim_slot(pair.number, batch.ids, [self.ids_field], rewinds=rewinds, wait_s=WAIT_S)
            except AlreadyDone:
                return None
            if claim is not None:
                break
        claimed, columns = claim
        made = self._tokens(batch, claimed, columns[self.ids_field])
        for sample, ids in zip(claimed.ids, made.of_samples(), strict=True):
            if sample in claimed.dead:
                ids.fill_(self.pad_id)
        return made

    def _tokens(self, batch: MicroBatch, claimed: Claimed, column: Column) -> ClaimedTokens:
        columns, pad_ids = {self.ids_field: column}, [self.pad_id] * len(batch.widths)
        if not batch.packed:
            padded = padded_batch(columns, widths=batch.widths, pad_ids=pad_ids)
            ids = padded[self.ids_field]
            return ClaimedTokens(claimed, ids, None, row_of_side(column, ids.numel()).lengths)
        row = row_of_side(column, batch.widths[1 + self.teacher])
        return ClaimedTokens(claimed, padded_row(values_of(column), row.width, self.pad_id), row, row.lengths)

    def _forward(self, pair: Pair, claim: ClaimedTokens) -> None:
        """Enqueue the forward pass; its slot is marked full once written, maybe after the next pass.

        Raises:
            RefusedSamplesError: The teacher cannot take some samples.
        """
        claimed, layout = claim.claimed, claim.row
        ring, slot = pair.ring, claimed.slot
        rows, width = claim.ids.shape
        self._write(ring, claim)
        others = self._other_columns(claimed)

        def complete() -> None:
            ring.write_generation(slot, claimed.generation)
            lengths = layout.lengths if layout is not None else None
            columns = ring.columns(slot, rows, width, self.teacher, lengths=lengths)
            self.queue.complete(claimed.lease, columns | others)

        pair.completions.after(complete)

    def _other_columns(self, claimed: Claimed) -> dict[str, Column]:
        """Return further columns for the trainer, once a micro-batch's signal is written."""
        del claimed
        return {}

    def _write(self, ring: SignalRing, claim: ClaimedTokens) -> None:
        """Write a micro-batch's signal into its slot, or enqueue that on the device.

        Raises:
            RefusedSamplesError: The teacher cannot take some samples.
        """
        assert isinstance(self.model, TeacherModel)
        tokens, layout, slot = claim.ids, claim.row, claim.claimed.slot
        rows, width = tokens.shape
        view = ring.slot_view(slot, rows, width)
        if self.shape.topk:
            self.model.write_topk(tokens, view, topk_settings(self.run, self.teacher), layout)
        elif self.shape.hidden:
            maxima = ring.maxima_view(slot, rows) if self.shape.max_rows else None
            self.model.write_hidden(tokens, view, maxima, layout)
        else:
            self.model.write_logits(tokens, view, layout)


class ServedLoop(TeacherLoop):
    """Serves a teacher that another program computes.

    Args:
        worker: As for `TeacherLoop`.
        model: The teacher.
        transport: As for `TeacherLoop`; `teacher`, `rank` and `pad_id` as well.
    """

    def __init__(
        self, worker: Worker, model: ServedTeacher, transport: str, *, teacher: int, rank: int, pad_id: int
    ) -> None:
        super().__init__(worker, model, transport, teacher=teacher, rank=rank, pad_id=pad_id)
        self.served = model
        self._scores: dict[tuple[int, ...], PromptScores | SampleRefusedError] = {}

    def _write(self, ring: SignalRing, claim: ClaimedTokens) -> None:
        """Write the servers' answers. They are kept until the next micro-batch: one that is refused comes again."""
        claimed = claim.claimed
        samples = [
            () if sample in claimed.dead else tuple(ids[:length].tolist())
            for sample, ids, length in zip(claimed.ids, claim.of_samples(), claim.lengths, strict=True)
        ]
        wanted = [ids for ids in dict.fromkeys(samples) if ids not in self._scores]
        known = {ids: self._scores[ids] for ids in samples if ids in self._scores}

        def waiting(answered: int) -> None:
            self.worker.activity(f"waiting for servers: {answered} of {len(wanted)} samples answered")
            self.worker.alive()

        self._scores = known | dict(zip(wanted, self.served.score(wanted, waiting), strict=True))
        self.worker.activity("")
        scores: list[PromptScores] = []
        refused: dict[int, SampleRefusedError] = {}
        for sample, ids in zip(claimed.ids, samples, strict=True):
            made = self._scores[ids]
            if isinstance(made, SampleRefusedError):
                refused[sample] = made
            else:
                scores.append(made)
        if refused:
            raise RefusedSamplesError(list(refused), f"{self.name}: {next(iter(refused.values()))}")
        rows, width = claim.ids.shape
        view = ring.slot_view(claimed.slot, rows, width)
        view.copy_(self.served.rows(scores, claim.parts(), view.shape))

    def _other_columns(self, claimed: Claimed) -> dict[str, Column]:
        """Return the requests since the micro-batch before, those of the check at the start with the first."""
        return {requests_field(self.teacher): self.served.new_requests().column(len(claimed.ids))}

    def _log_memory(self) -> None:
        self.served.log_use()


class StoredLoop(TeacherLoop):
    """Serves a teacher whose output is read from a store.

    Args:
        worker: As for `TeacherLoop`.
        model: The teacher.
        transport: As for `TeacherLoop`; `teacher` and `rank` as well.
    """

    def __init__(self, worker: Worker, model: StoredTeacher, transport: str, *, teacher: int, rank: int) -> None:
        super().__init__(worker, model, transport, teacher=teacher, rank=rank, pad_id=0)  # no model reads the padding
        self.stored = model

    def _write(self, ring: SignalRing, claim: ClaimedTokens) -> None:
        claimed, (rows, width) = claim.claimed, claim.ids.shape
        samples = [
            ids[: 0 if sample in claimed.dead else length]
            for sample, ids, length in zip(claimed.ids, claim.of_samples(), claim.lengths, strict=True)
        ]
        view = ring.slot_view(claimed.slot, rows, width)
        on_host = view if view.device.type == "cpu" else torch.empty(view.shape, dtype=view.dtype)
        self.stored.read_into(on_host, claimed.ids, samples, claim.parts())
        if on_host is not view:
            view.copy_(on_host)

    def _other_columns(self, claimed: Claimed) -> dict[str, Column]:
        """Return the records read since the micro-batch before."""
        return {requests_field(self.teacher): self.stored.new_reads().column(len(claimed.ids))}
