"""Streams of events: how many are open, and one look at a run for all that follow it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from services.control.api.models import Note, RunStatus
from services.control.curves import RECENT, Curve
from services.control.store import Store
from services.control.views import View
from services.supervisor.run_record import RunState

MOST_STREAMS = 500
LOOK_S = 0.5
MOST_NOTES = 200

Encoded = Sequence[tuple[int, bytes]]


@dataclass(frozen=True)
class Look:
    """What there was to tell of a run at one moment.

    Attributes:
        generation: How often its curves were read from their beginning.
        state: Its state; None if it has been removed.
        status: The answer of `GET /v1/runs/{id}`, as JSON.
        steps: The last lines of its curves, by step, as JSON.
        eval: The last readings of its held-out text, likewise.
        notes: What has happened to it, by the notes' ids, as JSON.
    """

    generation: int
    state: RunState | None
    status: bytes
    steps: Encoded
    eval: Encoded
    notes: Encoded


class Lines:
    """A curve's last lines as JSON, each encoded once."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=RECENT)
        self._generation, self._count = 0, 0

    def all(self) -> tuple[int, Encoded]:
        """How often the curve was read from its beginning, and its last lines by step."""
        before = self._generation
        self._generation, self._count, news = self._curve.beyond(before, self._count)
        if self._generation != before:
            self._lines.clear()
        self._lines.extend((line["step"], json.dumps(line).encode()) for line in news)
        return self._generation, tuple(self._lines)


class Feed:
    """Looks at a run twice a second, in one thread at a time, as long as somebody follows it.

    Args:
        view: The run.
        store: Where its notes are.
    """

    def __init__(self, view: View, store: Store) -> None:
        self._view, self._store = view, store
        self._steps, self._eval = Lines(view.steps), Lines(view.eval)
        self._changed = asyncio.Event()
        self._look: Look | None = None
        self._task: asyncio.Task[None] | None = None
        self.followers = 0

    def enter(self) -> None:
        """Somebody follows."""
        self.followers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._work())

    def leave(self) -> None:
        """Somebody does not any more."""
        self.followers -= 1
        if not self.followers and self._task is not None:
            self._task.cancel()

    async def next(self, seen: Look | None) -> Look:
        """The last look, or the next one if that has been seen.

        Raises:
            Exception: What went wrong in looking.
        """
        while self._look is None or self._look is seen:
            if self._task is not None and self._task.done():
                self._task.result()
            await self._changed.wait()
        return self._look

    async def _work(self) -> None:
        try:
            while True:
                self._look = await run_in_threadpool(self._now)
                self._tell()
                await asyncio.sleep(LOOK_S)
        finally:
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _now(self) -> Look:
        status = self._view.status()
        if status is None:
            return Look(0, None, b"", (), (), ())
        state = RunState(status["state"])
        self._view.refresh(at_once=state.over)  # what a stream has not sent by its end it never sends
        generation, steps = self._steps.all()
        notes = self._view.fresh.get("notes", lambda: self._store.notes(self._view.run_id, limit=MOST_NOTES))
        return Look(
            generation, state, encoded(self._view, status), steps, self._eval.all()[1],
            tuple((note.id, _as_json(note)) for note in notes),
        )  # fmt: skip


class Streams:
    """The streams that are open: each holds a connection for as long as its run lasts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: dict[str, Feed] = {}
        self.open = 0

    def enter(self) -> bool:
        """One more; False if there are too many."""
        with self._lock:
            if self.open >= MOST_STREAMS:
                return False
            self.open += 1
            return True

    def leave(self) -> None:
        """One less."""
        with self._lock:
            self.open -= 1

    @asynccontextmanager
    async def feed(self, view: View, store: Store) -> AsyncIterator[Feed]:
        """The feed of a run, shared by all that follow it now."""
        feed = self._feeds.get(view.run_id)
        if feed is None:
            feed = self._feeds[view.run_id] = Feed(view, store)
        feed.enter()
        try:
            yield feed
        finally:
            feed.leave()
            if not feed.followers and self._feeds.get(view.run_id) is feed:
                del self._feeds[view.run_id]


def encoded(view: View, status: dict[str, Any]) -> bytes:
    """A run's status as it is answered; encoded once as long as it is fresh."""
    return view.fresh.get(STATUS, lambda: RunStatus.model_validate(status).model_dump_json().encode())


def _as_json(note: Any) -> bytes:
    return Note.model_validate(note, from_attributes=True).model_dump_json().encode()


STATUS = "status as JSON"
