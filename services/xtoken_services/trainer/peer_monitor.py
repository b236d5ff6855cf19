"""Monitor of the other ranks for trainers that torchrun has started."""

from __future__ import annotations

import logging
import os
import threading
import time
from enum import IntEnum

import torch
import torch.distributed as dist

log = logging.getLogger("xtoken.trainer")

EVERY_S = 1.0
GRACE_S = 5.0
CLOSE_S = 5.0


class RankState(IntEnum):
    """State that a rank reports; the highest of all ranks counts."""

    ALIVE = 0
    CLOSING = 1
    FAILED = 2


class PeerMonitor:
    """Thread that ends this process if another rank fails or exits during the training.

    A collective of NCCL may wait on the GPU for a process that is gone, and its time limit is a day. A supervisor
    restarts all ranks itself; torchrun only waits for each of its own processes to exit.

    Args:
        group: A gloo process group of its own, so that the thread's collectives never mix with others.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._state = RankState.ALIVE
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="peers", daemon=True)
        self._thread.start()

    def close(self, *, failed: bool) -> None:
        """Report that this rank leaves the group.

        Args:
            failed: It leaves because of an error. The process then ends after `GRACE_S`, also if it hangs.
        """
        self._state = RankState.FAILED if failed else RankState.CLOSING
        self._wake.set()
        self._thread.join(0 if failed else CLOSE_S)

    def _exchange(self) -> None:
        """Exchange the states once a second: the body of the thread."""
        while True:
            self._wake.wait(EVERY_S)
            highest = torch.tensor([self._state])
            try:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
            except RuntimeError:  # a connection was closed
                highest.fill_(RankState.FAILED)
            if highest == RankState.ALIVE:
                continue
            if highest == RankState.CLOSING or self._state == RankState.CLOSING:
                return
            break
        if self._state == RankState.ALIVE:
            log.error("another rank has failed or was killed: this process exits, to be restarted with it")
        time.sleep(GRACE_S)  # the error that the main thread gets, if it gets one, is logged first
        os._exit(1)
