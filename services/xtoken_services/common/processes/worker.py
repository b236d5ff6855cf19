"""Session of a worker process: connect, open a session, heartbeat, progress, graceful shutdown."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.queue_client import QueueClient
from xtoken_core.data_plane.run_client import RunClient
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import QueueUnreachableError, StaleSessionError, XtokenError
from xtoken_core.wire import QueueError
from xtoken_core.wire.errors import Code
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.processes.supervised import set_title
from xtoken_services.common.processes.waits import longest_wait

log = logging.getLogger("xtoken.worker")
T = TypeVar("T")

SILENCE_S = 15.0
BEAT_S = 3.0
EARLY_S = 120.0
TOKEN_POLL_S = 0.1
WAIT_S = 2.0
"""Duration of one waiting call; a worker checks for a stop request between two of them."""


class StopRequested(Exception):  # noqa: N818 - asked for by SIGTERM or SIGINT, not a failure
    """The process was asked to stop, and is at a point where it may."""


class Worker:
    """A worker's session.

    Attributes:
        run: The resolved run.
        queue: Client of the run's calls.
        stopping: Set once the process was asked to stop.
    """

    def __init__(self, client: QueueClient, name: str) -> None:
        self.client = client
        self.name = name
        self.queue = RunClient(client)
        self.run: ResolvedRun = parse_resolved_run(client.run_document, source=f"the queue at {client.transport.url}")
        self.stopping = threading.Event()
        self._stale: StaleSessionError | None = None
        self._phase = "load"
        self._limit = self.run.spec.workers.hang_timeout_s
        self._units = 0
        self._activity = "loading"
        self._seen: object = None
        self._alive_at = time.monotonic()
        self._done = threading.Event()

    def phase(self, name: str) -> None:
        """Start a phase: `load`, then `run`."""
        self._phase, self._activity = name, ""
        self.beat()

    def activity(self, text: str, fraction: float | None = None) -> None:
        """Report work that takes long, in words; an empty text: steps again.

        Args:
            text: What is done, such as `evaluating`.
            fraction: Part of it that is done; None: unknown.
        """
        self._activity = text if fraction is None else f"{text}: {fraction:.0%}"

    def alive(self, units: int = 0) -> None:
        """Report progress from a point at which the main loop may stop.

        Args:
            units: Units of work finished since the last report.

        Raises:
            StopRequested: The process was asked to stop.
            StaleSessionError: The queue has ended the session.
        """
        self.beat(units)
        if self.stopping.is_set():
            raise StopRequested

    def until(self, ask: Callable[[], T | None]) -> T:
        """Repeat a call that waits for `WAIT_S` at most until it has an answer, and report progress before each.

        Raises:
            StopRequested: The process was asked to stop.
            StaleSessionError: The queue has ended the session.
        """
        while True:
            self.alive()
            answer = ask()
            if answer is not None:
                return answer

    def serve(self, once: Callable[[], None], *, unless: Code) -> None:
        """Repeat a piece of work until the run ends.

        Args:
            once: Does it.
            unless: Refusal of the queue after which the next piece is begun.

        Raises:
            QueueError: The queue refuses for another reason.
        """
        while True:
            try:
                once()
            except QueueError as error:
                if error.code == "exhausted":
                    log.info("the run is over")
                    return
                if error.code != unless:
                    raise
                log.info("%s", error)

    def waiting(self, seen: object) -> None:
        """Report progress as `alive` does, if what was received has changed since the last call.

        Args:
            seen: What was received so far: while it is the same, a wait counts as no progress.

        Raises:
            StopRequested: The process was asked to stop.
            StaleSessionError: The queue has ended the session.
        """
        if seen != self._seen:
            self._seen = seen
            self.alive()
        elif self._stale is not None:
            raise self._stale
        elif self.stopping.is_set():
            raise StopRequested

    def beat(self, units: int = 0) -> None:
        """Report progress from a point at which the main loop must not stop.

        Args:
            units: Units of work finished since the last report.

        Raises:
            StaleSessionError: The queue has ended the session.
        """
        self._units += units
        self._alive_at = time.monotonic()
        if self._stale is not None:
            raise self._stale

    def beat_until_done(self) -> None:
        """Send heartbeats while the main loop makes progress: the body of the background thread."""
        while not self._done.wait(BEAT_S):
            if time.monotonic() - self._alive_at > self._limit:
                log.error("no progress for %g s in phase %s: heartbeats stop", self._limit, self._phase)
                return
            try:
                activity = ", ".join(filter(None, (self._activity, longest_wait())))
                self.client.heartbeat(self._phase, self._units, activity)
            except StaleSessionError as error:
                self._stale = error
                return
            except (XtokenError, QueueError) as error:
                log.warning("heartbeat failed: %s", error)

    def finish(self) -> None:
        """Stop the heartbeats."""
        self._done.set()


@dataclass(frozen=True)
class QueueLink:
    """Connection settings of a worker.

    Attributes:
        url: The queue's address.
        token_file: The file with its token, for a loopback tcp address.
        keys: The directory of keys, for any other tcp address.
        incarnation: Which start of this worker it is; None: the time, so that a later start replaces an earlier one.
        patience_s: How long an unanswered request is repeated.
    """

    url: str
    token_file: Path | None = None
    keys: Path | None = None
    incarnation: int | None = None
    patience_s: float = 30.0


def set_by_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set from now on; main thread only."""
    stopping = threading.Event()

    def ask_to_stop(number: int, _frame: FrameType | None) -> None:
        log.info("%s: leaving", signal.Signals(number).name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_stop)
    return stopping


@contextmanager
def worker_session(link: QueueLink, *, role: str, name: str, rank: int = 0) -> Iterator[Worker]:
    """Connect, wait for the run and open a session; send heartbeats in the background and `bye` at the end.

    SIGTERM and SIGINT set `stopping`; the next `alive()` of the body raises `StopRequested`.

    Raises:
        QueueUnreachableError: There is no answer at the address, or no run was opened there in time.
    """
    set_title(name)
    address = Address.parse(link.url, link.token_file, link.keys)
    _await_token(address, link.patience_s)
    client = QueueClient(ZmqTransport(address, patience_s=link.patience_s))
    stopping = set_by_signals()
    incarnation = time.time_ns() if link.incarnation is None else link.incarnation
    try:
        if not client.hello(
            name, role, incarnation=incarnation, rank=rank, silence_s=SILENCE_S, needs_run=True, wait_s=EARLY_S
        ):
            raise QueueUnreachableError(
                f"the queue at {link.url} answers, but no run was opened there in {EARLY_S:g} s"
            )
        worker = Worker(client, name)
        roots = Roots.of_environment()
        if roots is not None:
            roots.check_run(worker.run.spec)
        worker.stopping = stopping
        thread = threading.Thread(target=worker.beat_until_done, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield worker
        except StopRequested:
            log.info("stopped")
        finally:
            worker.finish()
            thread.join()
            _leave(client)
    finally:
        client.close()


def _await_token(address: Address, limit_s: float) -> None:
    """Wait for the token file, which the queue creates when it starts, maybe after the worker.

    Raises:
        QueueUnreachableError: It does not exist after `limit_s` seconds.
    """
    file, deadline = address.token_file, time.monotonic() + limit_s
    if file is None or file.exists():
        return
    log.info("waiting for %s, which the queue at %s makes when it starts", file, address.url)
    while not file.exists():
        if time.monotonic() > deadline:
            raise QueueUnreachableError(
                f"there is no token file {file} after {limit_s:g} s: start the queue at {address.url} with it, or name "
                "the right one"
            )
        time.sleep(TOKEN_POLL_S)


def _leave(client: QueueClient) -> None:
    try:
        client.bye()
    except (XtokenError, QueueError) as error:
        log.info("the session could not be closed: %s", error)
