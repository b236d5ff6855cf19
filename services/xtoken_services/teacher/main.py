"""`xtoken teacher`: connect to a queue, open one teacher, and serve its rank until the run ends."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from xtoken_core import schema
from xtoken_core.data_plane.queue_client import AlreadyDone
from xtoken_core.data_plane.run_client import StepRows
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.plan import MicroBatch
from xtoken_core.queue.run.names import TEACHER
from xtoken_core.served_requests import requests_field
from xtoken_core.transports import remove_stale_files
from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
from xtoken_core.transports.factory import create_ring, pick_transport
from xtoken_core.transports.queue_signal import TRANSPORT as QUEUE
from xtoken_core.transports.signal import SignalRing
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire.messages import Claimed
from xtoken_services.common.batches.step_plan import StepPlan, plan_fields, plan_step, ring_shape
from xtoken_services.common.generation.published_weights import Version, load_weights, read_version, weights_file
from xtoken_services.common.processes.event_callbacks import EventCallbacks
from xtoken_services.common.processes.worker import WAIT_S, QueueLink, Worker, worker_session
from xtoken_services.teacher.base import RefusedSamplesError, Teacher, TeacherBatch
from xtoken_services.teacher.held_out import measure_held_out
from xtoken_services.teacher.opening import opened_teacher
from xtoken_services.teacher.prepare import TeacherModel, devices_of

log = logging.getLogger("xtoken.teacher")
POLL_S = 0.01
"""Seconds between two looks for the weights of a step."""


def work(link: QueueLink, *, teacher: int, rank: int, name: str | None) -> None:
    """Serve one teacher to one rank.

    Raises:
        ConfigError: The run has no such teacher or rank.
        InputError: The teacher cannot be opened, or its head is narrower than its vocabulary.
    """
    name = name or f"teacher-{teacher}-{rank}"
    with worker_session(link, role=TEACHER, name=name, rank=rank) as worker:
        spec = worker.run.spec
        if teacher >= len(spec.teacher) or rank >= spec.workers.ranks:
            raise ConfigError(
                f"--teacher {teacher} --rank {rank}: the run {spec.name!r} has {len(spec.teacher)} teachers "
                f"and {spec.workers.ranks} ranks"
            )
        for leftover in remove_stale_files():
            log.warning("removed %s, left behind by a process that is gone", leftover)
        device = devices_of(spec, teacher, rank)[0]
        transport = pick_transport(spec.workers.transport, device)

        def report(activity: str) -> None:
            worker.activity(activity)
            worker.waiting(activity)

        with opened_teacher(worker.run, teacher, rank, report, transport) as model:
            if (worker.run.group, rank) == (0, 0):  # the rank that writes the run's evaluations waits for it
                # Teachers of different texts are compared text by text.
                for also in (None, *(spec.eval.also_by_name if spec.eval and worker.run.routes else ())):
                    measure_held_out(worker.run, teacher, model, report, also)
            worker.phase("run")
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            TeacherLoop(worker, model, transport, teacher=teacher, rank=rank).serve()


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
    """

    def __init__(self, worker: Worker, model: Teacher, transport: str, *, teacher: int, rank: int) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.model, self.transport = model, transport
        self.teacher, self.rank = teacher, rank
        shared = self.run.same_tokenizer[teacher]
        self.ids_field = schema.INPUT_IDS.name if shared else schema.field_name(schema.TEACHER_INPUT_IDS, teacher)
        self.shape = ring_shape(self.run, teacher)
        self._weights = weights_file(self.run, teacher) if teacher in self.run.spec.sync_decays else None
        self._loaded: Version | None = None

    def serve(self) -> None:
        """Serve one trainer session after another until the run ends."""
        self.worker.serve(self._pair, unless="ring_closed")

    def _pair(self) -> None:
        """Create a ring for the next trainer session and fill it until that session ends."""
        trainer = self.worker.until(lambda: self.queue.await_trainer(self.rank, wait_s=WAIT_S))
        spec = self.run.spec
        ring = create_ring(self.transport, self.shape, run=spec.name, session=trainer.trainer, device=self.model.device)
        limit = spec.workers.hang_timeout_s
        completions = EventCallbacks(self.model.device, f"completions of {self.model.name}", limit_s=limit)
        try:
            with self._head_in(ring):
                number = self.queue.announce_ring(self.teacher, self.rank, trainer.trainer, ring.handle.to_bytes())
                self.worker.until(lambda: self.queue.await_opened(number, wait_s=WAIT_S) or None)
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
                    if self.teacher in batch.teachers and self._moved(step, rewinds):
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

        def ask() -> StepRows | None:
            pair.completions.check()
            return self.queue.window(step, plan_fields(self.run), rewinds=rewinds, wait_s=WAIT_S)

        try:
            return plan_step(self.run, step, self.worker.until(ask))
        except AlreadyDone:
            return None

    def _moved(self, step: int, rewinds: int) -> bool:
        """Wait for the weights of a step, if they move; return False if the step was done meanwhile."""
        model, file = self.model, self._weights
        if file is None or not isinstance(model, TeacherModel):
            return True

        def ask() -> bool | None:
            self.queue.window(step, (), rewinds=rewinds, wait_s=0.0)  # refused after a rewind
            try:
                version = read_version(file)
                if version.step == step and version != self._loaded:
                    self._loaded = None  # a failure in between leaves a mixture
                    self._loaded = version = load_weights(model.model, file)
                if version.step == step:
                    return True
            except InputError as error:  # being written, or its trainer has ended, and another one will publish
                log.debug("%s", error)
            time.sleep(POLL_S)
            return None

        try:
            return self.worker.until(ask)
        except AlreadyDone:
            return False

    def _signal(self, pair: Pair, batch: MicroBatch, rewinds: int) -> None:
        """Write a micro-batch's signal into a slot, after a nack of samples that this teacher cannot take."""
        while batch.ids:
            claim = self._claim(pair, batch, rewinds)
            if claim is None:
                return
            claimed, columns = claim
            tokens = self.ids_field, columns[self.ids_field]
            width = batch.widths[1 + self.teacher]
            try:
                made = TeacherBatch.of(batch, tokens, width, self.model.pad_id, claimed.dead)
                written = frozenset(filter(self.run.prompts.holds, batch.ids))
                self._forward(pair, claimed, replace(made, completions=written))
            except RefusedSamplesError as error:
                self.queue.nack(claimed.lease, error.samples, str(error))
            else:
                self.worker.alive(1)
                return

    def _claim(self, pair: Pair, batch: MicroBatch, rewinds: int) -> tuple[Claimed, dict[str, Column]] | None:
        """Claim a micro-batch with a slot; None if its signal exists or was read."""

        def ask() -> tuple[Claimed, dict[str, Column]] | None:
            pair.completions.check()
            return self.queue.claim_slot(pair.number, batch.ids, [self.ids_field], rewinds=rewinds, wait_s=WAIT_S)

        try:
            return self.worker.until(ask)
        except AlreadyDone:
            return None

    def _forward(self, pair: Pair, claimed: Claimed, batch: TeacherBatch) -> None:
        """Enqueue the forward pass; its slot is marked full once written, maybe after the next pass.

        Raises:
            RefusedSamplesError: The teacher cannot take some samples.
        """
        ring, slot, (rows, width) = pair.ring, claimed.slot, batch.ids.shape
        maxima = ring.maxima_view(slot, rows) if self.shape.max_rows else None
        self.model.write(batch, ring.slot_view(slot, rows, width), maxima)
        requests = self.model.new_requests()
        others = {} if requests is None else {requests_field(self.teacher): requests.column(len(claimed.ids))}

        def complete() -> None:
            ring.write_generation(slot, claimed.generation)
            lengths = batch.lengths if batch.row is not None else None
            columns = ring.columns(slot, rows, width, self.teacher, lengths=lengths)
            self.queue.complete(claimed.lease, columns | others)

        pair.completions.after(complete)
