"""The supervisor's session on a queue: reads its statistics and detects workers that are gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.queue_client import QueueClient
from xtoken_core.data_plane.run_client import RunClient
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import QueueUnreachableError, StaleSessionError, XtokenError
from xtoken_core.queue.run.names import SUPERVISOR
from xtoken_core.wire import QueueError

PATIENCE_S = 1.0
SILENCE_S = 120.0
SHOWN_IDS = 20
SILENT = "no sign of life"
EXIT_TIMEOUT_S = 60.0


class QueueMonitor:
    """A session on a run's queue; it only reads, apart from `give_up`.

    Args:
        address: Returns the queue's address; None while it is not known.

    Attributes:
        stats: The queue's last statistics, see `xtoken_core.queue.stats`; empty before the first.
        answered_at: Time of its last answer, by `time.monotonic`.
    """

    def __init__(self, address: Callable[[], Address | None]) -> None:
        self._address = address
        self._client: QueueClient | None = None
        self.stats: dict[str, Any] = {}
        self._leased: dict[str, list[int]] = {}
        self.answered_at = 0.0

    @property
    def connected(self) -> bool:
        """True once the queue has answered since it was started."""
        return self._client is not None

    @property
    def partition(self) -> dict[str, Any]:
        """Statistics of the run's partition; empty before the first."""
        partitions = self.stats.get("partitions", {}).values()
        partition: dict[str, Any] = next((p for p in partitions if "run" in p), {})
        return partition

    @property
    def run(self) -> dict[str, Any]:
        """Statistics of the run's progress; empty before the first."""
        run: dict[str, Any] = self.partition.get("run", {})
        return run

    def connect(self) -> bool:
        """Open a session; return False if the queue does not answer yet.

        Raises:
            XtokenError: The address or its token file is wrong.
        """
        address = self._address()
        if address is None:
            return False
        client = QueueClient(ZmqTransport(address, patience_s=PATIENCE_S))
        try:
            client.hello(f"supervisor-{os.getpid()}", SUPERVISOR, incarnation=time.time_ns(), silence_s=SILENCE_S)
        except (QueueUnreachableError, QueueError):
            client.close()
            return False
        except BaseException:
            client.close()
            raise
        self._client = client
        self.answered_at = time.monotonic()
        return self.poll()

    def poll(self) -> bool:
        """Read the queue's statistics; return False if it did not answer, or has ended this session."""
        if self._client is None:
            return False
        try:
            self.stats = self._client.stats()
        except StaleSessionError:
            self.disconnect()
            return False
        except (QueueUnreachableError, QueueError):
            return False
        self.answered_at = time.monotonic()
        return True

    def record_leases(self, tasks: Collection[str]) -> None:
        """Record the first ids that are leased for each task now: a worker that fails gracefully returns its own."""
        if self._client is None or not self._client.partition:
            return
        for task in tasks:
            with contextlib.suppress(XtokenError, QueueError):
                listed = self._client.list_samples(self._client.partition, "leased", task=task, limit=SHOWN_IDS)
                self._leased[task] = list(listed.ids) or self._leased.get(task, [])

    def leased(self, task: str) -> list[int]:
        """Return the ids last seen leased for a task, without those of steps that are done."""
        self.record_leases([task])
        first = self.run.get("step", 0) * self.run.get("samples_per_step", 0)
        return [sample for sample in self._leased.get(task, []) if sample >= first]

    def give_up(self, reason: str) -> None:
        """End the run for every worker, through the queue; best effort."""
        if self._client is not None and self._client.partition:
            with contextlib.suppress(XtokenError, QueueError):
                RunClient(self._client).give_up(reason)

    def disconnect(self) -> None:
        """Drop the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        """End the session and drop the connection."""
        if self._client is not None:
            with contextlib.suppress(XtokenError, QueueError):
                self._client.bye()
        self.disconnect()


def loss_reason(stats: dict[str, Any], name: str, incarnation: int, *, overdue: bool) -> str:
    """Return why a worker counts as lost although its process runs; empty if it does not.

    A worker whose session has ended gracefully has `EXIT_TIMEOUT_S` to exit: it may still write a model.

    Args:
        stats: The queue's statistics.
        name: Name of the worker.
        incarnation: Number of its start.
        overdue: Whether it should have opened its session by now.
    """
    if find_session(stats, name, incarnation) is not None:
        return ""
    ended = [s for s in stats.get("ended_sessions", ()) if (s["name"], s["incarnation"]) == (name, incarnation)]
    if not ended:
        return "it has opened no session in time" if overdue else ""
    last = ended[-1]
    if SILENT in last["ended"] or last["seen_age_s"] > EXIT_TIMEOUT_S:
        return f"its session has ended: {last['ended']}"
    return ""


def find_session(stats: dict[str, Any], name: str, incarnation: int) -> dict[str, Any] | None:
    """Return a worker's open session from the queue's statistics."""
    sessions: Iterable[dict[str, Any]] = stats.get("sessions", ())
    return next((each for each in sessions if (each["name"], each["incarnation"]) == (name, incarnation)), None)
