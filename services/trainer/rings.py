"""The student's end of its teachers' rings: opened once per teacher session, looked after between claims."""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch import Tensor

from services.common.event_callbacks import EventCallbacks
from services.common.step_plan import ring_shape
from services.common.worker import Worker
from xtoken_core.transports.factory import open_ring
from xtoken_core.transports.head import load_head
from xtoken_core.transports.queue_signal import OpenedQueueRing, take_columns
from xtoken_core.transports.ring import SignalError
from xtoken_core.transports.signal import forget_ring, opened_ring
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire.messages import SlotRef

log = logging.getLogger("xtoken.trainer")


class OpenRings:
    """The rings that this rank has open, one per teacher.

    Args:
        worker: The session.
        device: Where the student computes.
    """

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self.worker, self.device = worker, device
        self._open: dict[int, int] = {}
        self._released = EventCallbacks(device, "releaser", limit_s=worker.run.spec.workers.step_timeout_s)

    def look_after(self) -> None:
        """Open what a teacher has announced since the last look; close what it replaces, and what a lost one has left.

        Raises:
            Exception: What a release has met.
        """
        self._released.check()
        run = self.worker.run
        for teacher in range(len(run.spec.teacher)):
            ring = self.worker.queue.await_ring(teacher, wait_s=0.0)
            known = self._open.get(teacher)
            if known is not None and (ring is None or ring.ring != known):
                log.warning("teacher %d has gone: ring %d is closed, the next teacher brings its own", teacher, known)
                self._forget(teacher)
            if ring is None or ring.ring == known:
                continue
            try:
                self._take(teacher, ring.ring, ring.handle)
                self.worker.queue.opened_ring(teacher, ring.ring)
            except (SignalError, QueueError) as error:
                self._explain(teacher, ring.ring, error)
            else:
                log.info("ring %d of teacher %d is open", ring.ring, teacher)

    def receive(self, slots: Iterable[SlotRef], columns: MutableMapping[str, Column]) -> None:
        """Move signals that came through the queue from a claim's columns into their rings."""
        for ref in slots:
            mine = take_columns(columns, ref.teacher)
            if not mine:
                continue
            ring = opened_ring(ref.ring)
            if not isinstance(ring, OpenedQueueRing):
                raise SignalError(f"ring {ref.ring} is in memory, and its signal came through the queue as well")
            ring.receive(ref.slot, ref.generation, mine, ref.teacher)

    def is_open(self, ref: SlotRef) -> bool:
        """Return whether the ring of a slot is open: a claim closes those of teachers that have gone."""
        return ref.ring in self._open.values()

    def release(self, slots: Sequence[SlotRef]) -> None:
        """Once the backward that read these slots has completed on the device: check, then release.

        Raises:
            StaleSignalError: A slot was refilled while it was read; on a GPU it comes from a later call.
        """

        def done() -> None:
            for ref in slots:
                opened_ring(ref.ring).check(ref.slot, ref.generation)
                self.worker.queue.release(ref.ring, ref.slot, ref.generation)

        self._released.after(done)

    def drain(self) -> None:
        """Wait until every slot is released: a step may be checked only then.

        Raises:
            StaleSignalError: A slot was refilled while it was read.
        """
        self._released.drain()

    def close(self) -> None:
        """Close all."""
        self._released.close()
        for teacher in list(self._open):
            forget_ring(self._open.pop(teacher))

    def _take(self, teacher: int, number: int, handle: bytes) -> None:
        run = self.worker.run
        shape, spec = ring_shape(run, teacher), run.spec.teacher[teacher]

        def head() -> Tensor:
            dtype: torch.dtype = getattr(torch, shape.dtype)
            return load_head(spec.model, width=shape.head_width, hidden=shape.hidden, dtype=dtype)

        open_ring(run.spec.workers.signal, number, handle, shape, device=self.device, head=head)
        self._open[teacher] = number

    def _explain(self, teacher: int, ring: int, error: Exception) -> None:
        """Go on if the teacher has gone meanwhile, with its ring: the next one announces its own."""
        self._forget(teacher)
        now = self.worker.queue.await_ring(teacher, wait_s=0.0)
        if now is not None and now.ring == ring:
            raise error
        log.info("ring %d of teacher %d is gone before it was open: %s", ring, teacher, error)

    def _forget(self, teacher: int) -> None:
        """Close a ring whose teacher has ended, once nothing reads it any more: until then its memory is taken."""
        ring = self._open.pop(teacher, None)
        if ring is not None:
            self._released.drain()
            forget_ring(ring)
