"""The student's end of its teachers' rings: opened once per teacher session, looked after between claims."""

from __future__ import annotations

import logging

from services.common.steps import ring_shape
from services.common.worker import Worker
from xtoken_core.teacher.ring import SignalError
from xtoken_core.teacher.signal import forget_ring, opened_ring
from xtoken_core.teacher.transports import open_ring
from xtoken_core.wire import QueueError

log = logging.getLogger("xtoken.trainer")


class OpenRings:
    """The rings that this rank has open, one per teacher."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._open: dict[int, int] = {}

    def look_after(self) -> None:
        """Open what a teacher has announced since the last look; close what it replaces."""
        run = self.worker.run
        for teacher in range(len(run.spec.teacher)):
            ring = self.worker.queue.await_ring(teacher, wait_s=0.0)
            if ring is None or self._open.get(teacher) == ring.ring:
                continue
            self._forget(teacher)
            try:
                open_ring(run.spec.workers.signal, ring.ring, ring.handle, ring_shape(run, teacher))
                self._open[teacher] = ring.ring
                self.worker.queue.opened_ring(teacher, ring.ring)
            except (SignalError, QueueError) as error:
                self._explain(teacher, ring.ring, error)
            else:
                log.info("ring %d of teacher %d is open", ring.ring, teacher)

    def release(self, slots: set[tuple[int, int, int]]) -> None:
        """The backward that read these slots (ring, slot, generation) has completed: check, then release.

        Raises:
            StaleSignalError: A slot was refilled while it was read.
        """
        for ring, slot, generation in sorted(slots):
            opened_ring(ring).check(slot, generation)
            self.worker.queue.release(ring, slot, generation)

    def close(self) -> None:
        """Close all."""
        for teacher in list(self._open):
            self._forget(teacher)

    def _explain(self, teacher: int, ring: int, error: Exception) -> None:
        """Go on if the teacher has gone meanwhile, with its ring: the next one announces its own."""
        self._forget(teacher)
        now = self.worker.queue.await_ring(teacher, wait_s=0.0)
        if now is not None and now.ring == ring:
            raise error
        log.info("ring %d of teacher %d is gone before it was open: %s", ring, teacher, error)

    def _forget(self, teacher: int) -> None:
        ring = self._open.pop(teacher, None)
        if ring is not None:
            forget_ring(ring)
