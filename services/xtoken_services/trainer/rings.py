"""The trainer's side of the teachers' rings: opens what teachers announce, reads slots, releases them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch import Tensor

from xtoken_core.losses.lazy_logits import HeadProjection, Logits
from xtoken_core.topk_logits import read_topk
from xtoken_core.transports.factory import open_ring
from xtoken_core.transports.head import load_head
from xtoken_core.transports.queue_signal import QueueRingReader, take_columns
from xtoken_core.transports.ring import SignalError
from xtoken_core.transports.signal import RINGS, SignalSlot
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire.messages import SlotRef
from xtoken_services.common.batches.step_plan import ring_shape, topk_settings
from xtoken_services.common.processes.event_callbacks import EventCallbacks
from xtoken_services.common.processes.worker import Worker

log = logging.getLogger("xtoken.trainer")


class TeacherRings:
    """The open rings of all teachers, at most one each, in the process's `RINGS`.

    Args:
        worker: The session.
        device: The trainer's device.
    """

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self.worker, self.device = worker, device
        self._teachers = range(len(worker.run.spec.teacher))
        self._releases = EventCallbacks(device, "releaser", limit_s=worker.run.spec.workers.hang_timeout_s)

    def poll(self) -> None:
        """Open rings that teachers have announced; close those that were replaced, or whose teacher has ended.

        Raises:
            StaleSignalError: A slot was refilled while it was read.
            QueueError: The queue refuses a release.
        """
        self._releases.check()
        for teacher in self._teachers:
            announced = self.worker.queue.await_ring(teacher, wait_s=0.0)
            known = RINGS.of_teacher(teacher)
            if known is not None and (announced is None or announced.ring != known):
                name = self._name(teacher)
                log.info("%s has ended: ring %d is closed, the next start of it opens a new one", name, known)
                self._close(teacher)
            if announced is None or announced.ring == known:
                continue
            try:
                self._open(teacher, announced.ring, announced.handle)
                self.worker.queue.confirm_ring(teacher, announced.ring)
            except (SignalError, QueueError) as error:
                self._check_replaced(teacher, announced.ring, error)
            else:
                log.info("ring %d of %s is open", announced.ring, self._name(teacher))

    def receive(self, slots: Iterable[SlotRef], columns: MutableMapping[str, Column]) -> None:
        """Move signals that came through the queue from a claim's columns into their rings."""
        for ref in slots:
            signal = take_columns(columns, ref.teacher)
            if not signal:
                continue
            ring = RINGS.get(ref.ring)
            if not isinstance(ring, QueueRingReader):
                raise SignalError(f"ring {ref.ring} is in memory, and its signal came through the queue as well")
            ring.receive(ref.slot, ref.generation, signal, ref.teacher)

    def logits(self, ref: SlotRef, rows: int, width: int) -> Logits:
        """Return a micro-batch's teacher logits on the student's device: whole, their factors, or the largest.

        They are a view of the teacher's memory if that is on the device, and one copy otherwise.

        Args:
            ref: Slot that holds the signal.
            rows: Samples of the micro-batch, B.
            width: Padded tokens per row, T_t.
        """
        signal = SignalSlot(RINGS.get(ref.ring), ref.slot, ref.generation, 0, rows, width)
        if signal.ring.shape.topk:
            rows_of_slot = signal.topk().to(self.device, non_blocking=True)
            return read_topk(rows_of_slot, topk_settings(self.worker.run, ref.teacher))
        if not signal.ring.shape.hidden:
            return signal.logits().to(self.device, non_blocking=True)
        states = signal.hidden(self.device)
        maxima = None if states.maxima is None else states.maxima.to(self.device, non_blocking=True)
        hidden = states.hidden.to(self.device, non_blocking=True)
        return HeadProjection(hidden, states.head, column_maxima=maxima)

    def release(self, slots: Sequence[SlotRef]) -> None:
        """Check and release slots once the backward that read them has completed on the device.

        The check comes after the device is done: a slot that was refilled meanwhile has been read half old, half new.

        Raises:
            StaleSignalError: A slot was refilled while it was read; on a GPU a later call raises it.
        """

        def check_and_release() -> None:
            for ref in slots:
                RINGS.get(ref.ring).check(ref.slot, ref.generation)
                self.worker.queue.release(ref.ring, ref.slot, ref.generation)

        self._releases.after(check_and_release)

    def drain(self) -> None:
        """Wait until every slot is released: only then may the step be checked.

        Raises:
            StaleSignalError: A slot was refilled while it was read.
        """
        self._releases.drain()

    def close(self) -> None:
        """Close all rings."""
        self._releases.close()
        for teacher in self._teachers:
            number = RINGS.of_teacher(teacher)
            if number is not None:
                RINGS.close(number)

    def _open(self, teacher: int, number: int, handle: bytes) -> None:
        run = self.worker.run
        shape, spec = ring_shape(run, teacher), run.spec.teacher[teacher]

        def head() -> Tensor:
            dtype: torch.dtype = getattr(torch, shape.dtype)
            return load_head(spec.model, width=shape.head_width, hidden=shape.hidden, dtype=dtype)

        transport = run.spec.workers.transport
        open_ring(transport, number, handle, shape, teacher=teacher, device=self.device, head=head)

    def _name(self, teacher: int) -> str:
        name = self.worker.run.spec.teacher_name(teacher)
        return "the teacher" if name == "teacher" else name

    def _check_replaced(self, teacher: int, number: int, error: Exception) -> None:
        """Raise the error of opening a ring, unless its teacher has ended meanwhile: the next one announces its own."""
        self._close(teacher)
        now = self.worker.queue.await_ring(teacher, wait_s=0.0)
        if now is not None and now.ring == number:
            raise error
        log.info("ring %d of %s was withdrawn before it was open: %s", number, self._name(teacher), error)

    def _close(self, teacher: int) -> None:
        """Close a teacher's ring once nothing reads it any more: until then its memory must stay mapped."""
        number = RINGS.of_teacher(teacher)
        if number is not None:
            self._releases.drain()
            RINGS.close(number)
