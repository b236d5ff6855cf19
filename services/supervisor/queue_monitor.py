"""The supervisor's own connection to the queue: is it there, what does it count, who has fallen silent."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
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
LEAVE_S = 60.0


class Observer:
    """A session on a run's queue that only looks, apart from `give_up`.

    Args:
        address: Tells where the queue is; None while nobody knows.

    Attributes:
        stats: What the queue last told, as `xtoken_core.queue.stats` writes it; empty before.
        answered_at: When it last answered, by `time.monotonic`.
    """

    def __init__(self, address: Callable[[], Address | None]) -> None:
        self._address = address
        self._client: QueueClient | None = None
        self.stats: dict[str, Any] = {}
        self._held: dict[str, list[int]] = {}
        self.answered_at = 0.0

    @property
    def connected(self) -> bool:
        """Whether the queue has answered since it was started."""
        return self._client is not None

    @property
    def partition(self) -> dict[str, Any]:
        """What the queue tells of the run's partition; empty before it told anything."""
        found: dict[str, Any] = next((p for p in self.stats.get("partitions", {}).values() if "run" in p), {})
        return found

    @property
    def run(self) -> dict[str, Any]:
        """What the queue tells of the run's progress; empty before it told anything."""
        found: dict[str, Any] = self.partition.get("run", {})
        return found

    def connect(self) -> bool:
        """Open a session; False if the queue does not answer yet.

        Raises:
            XtokenError: The address or its token file is wrong.
        """
        address = self._address()
        if address is None:
            return False
        client = QueueClient(ZmqTransport(address, patience_s=PATIENCE_S))
        try:
            client.hello(f"control-{os.getpid()}", SUPERVISOR, incarnation=time.time_ns(), silence_s=SILENCE_S)
        except (QueueUnreachableError, QueueError):
            client.close()
            return False
        except BaseException:
            client.close()
            raise
        self._client = client
        self.answered_at = time.monotonic()
        return self.look()

    def look(self) -> bool:
        """Read the queue's counts; False if it did not answer, or not to this session any more."""
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

    def note_leases(self, tasks: Collection[str]) -> None:
        """Remember the first ids that are leased for each task now: a worker that fails in order gives its own back."""
        if self._client is None or not self._client.partition:
            return
        for task in tasks:
            with contextlib.suppress(XtokenError, QueueError):
                listed = self._client.list_samples(self._client.partition, "leased", task=task, limit=SHOWN_IDS)
                self._held[task] = list(listed.ids) or self._held.get(task, [])

    def leased(self, task: str) -> list[int]:
        """The ids last seen leased for a task, of steps that are not done."""
        self.note_leases([task])
        first = self.run.get("step", 0) * self.run.get("samples_per_step", 0)
        return [sample for sample in self._held.get(task, []) if sample >= first]

    def give_up(self, reason: str) -> None:
        """Tell every worker, through the queue, that the run has ended; best effort."""
        if self._client is not None and self._client.partition:
            with contextlib.suppress(XtokenError, QueueError):
                RunClient(self._client).give_up(reason)

    def disconnect(self) -> None:
        """Forget the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        """Say bye and disconnect."""
        if self._client is not None:
            with contextlib.suppress(XtokenError, QueueError):
                self._client.bye()
        self.disconnect()


def why_gone(stats: dict[str, Any], name: str, incarnation: int, *, unseen_for_long: bool) -> str:
    """Why a worker whose process lives counts as lost: its session has ended and it does not leave; empty if not.

    Args:
        stats: What the queue tells.
        name: The worker's name.
        incarnation: Which start of it.
        unseen_for_long: Whether it should have opened its session by now.
    """
    if session_of(stats, name, incarnation) is not None:
        return ""
    ended = [s for s in stats.get("ended_sessions", ()) if (s["name"], s["incarnation"]) == (name, incarnation)]
    if not ended:
        return "it has opened no session in time" if unseen_for_long else ""
    last = ended[-1]
    if SILENT in last["ended"] or last["seen_age_s"] > LEAVE_S:
        return f"its session has ended: {last['ended']}"
    return ""


def session_of(stats: dict[str, Any], name: str, incarnation: int) -> dict[str, Any] | None:
    """A worker's living session, as the queue counts it."""
    for session in stats.get("sessions", ()):
        if (session["name"], session["incarnation"]) == (name, incarnation):
            found: dict[str, Any] = session
            return found
    return None
