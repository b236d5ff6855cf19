"""A run's news as server-sent events: what changes, when it changes, from the same views as every other answer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, HTTPException, Query
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from services.control.api.models import Note, RunStatus
from services.control.api.plane import Plane, RunId, ThePlane, problems_of
from services.control.api.streams import Streams
from services.control.curves import Curve
from services.control.record import RunState
from services.control.views import View

LOOK_S = 0.5
STATUS_S = 2.0
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
MOST_NOTES = 200
EVENT_ID = re.compile(r"(-?\d{1,18}):(-?\d{1,18}):(\d{1,18})")

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["files"])


@dataclass
class Cursor:
    """What a stream has sent: the last step, the last reading's step, the last note's id."""

    step: int
    eval: int
    note: int

    @property
    def id(self) -> str:
        """As an event's id, which a client sends back when it connects again."""
        return f"{self.step}:{self.eval}:{self.note}"


@router.get("/events", response_class=StreamingResponse, responses={
    200: {"content": {"text/event-stream": {}}}, **problems_of(404, 422, 503)
})  # fmt: skip
def stream_events(
    run_id: RunId,
    plane: ThePlane,
    after: Annotated[
        int | None,
        Query(ge=-1, le=2**62, description="Begin with the steps beyond this one; with the next, if left out."),
    ] = None,
    last_event_id: Annotated[str | None, Header(max_length=64, description="Where a broken stream goes on.")] = None,
) -> StreamingResponse:
    """A run's news as server-sent events, until it is over.

    `status` (the answer of `GET /v1/runs/{id}`, at first and whenever it has changed), `step` and `eval` (lines of the
    curves; the last thousand at most), `note` (something has happened), `rewound` (the curves were cut back: read them
    anew), `end` (the run is over; close the stream).
    """
    view = plane.view(run_id)
    if not plane.streams.enter():
        raise HTTPException(503, "too many streams of events are open", {"Retry-After": "10"})
    found = EVENT_ID.fullmatch(last_event_id or "")
    if found:
        cursor = Cursor(*map(int, found.groups()))
    else:
        view.refresh()
        step, read = (curve.last["step"] if curve.last else -1 for curve in (view.steps, view.eval))
        notes = plane.runs.store.notes(run_id, limit=1)
        cursor = Cursor(step, read, notes[0].id if notes else 0)
        if after is not None:
            cursor.step = cursor.eval = after
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return CountedStream(_events(plane, view, cursor), plane.streams, headers)


class CountedStream(StreamingResponse):
    """A stream of events that says when it has ended, however it ended."""

    def __init__(self, content: AsyncIterator[bytes], streams: Streams, headers: dict[str, str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._streams = streams

    async def __call__(self, *arguments: Any) -> None:
        """Send it."""
        try:
            await super().__call__(*arguments)
        finally:
            self._streams.leave()


async def _events(plane: Plane, view: View, cursor: Cursor) -> AsyncIterator[bytes]:
    yield f"retry: {RETRY_MS}\n\n".encode()
    generations = view.steps.generation
    told_at, sent_at, told = 0.0, time.monotonic(), None
    while True:
        news, generation, state, status = await run_in_threadpool(_look, plane, view, cursor)
        if generation != generations:
            generations = generation
            yield _event("rewound", b"{}", cursor)
        changed = state != told or time.monotonic() - told_at >= STATUS_S
        if status is not None and changed:
            told_at, told = time.monotonic(), state
            news = [_event("status", status, cursor), *news]
        for event in news:
            yield event
        if state is None or state.over:
            yield _event("end", b"{}", cursor)
            return
        if news:
            sent_at = time.monotonic()
        elif time.monotonic() - sent_at > KEEP_ALIVE_S:
            sent_at = time.monotonic()
            yield b": still here\n\n"
        await anyio.sleep(LOOK_S)


def _look(plane: Plane, view: View, cursor: Cursor) -> tuple[list[bytes], int, RunState | None, bytes | None]:
    """What a stream has not sent, how often the curves were read, the run's state and its status as JSON."""
    status = view.status()
    if status is None:
        return [], view.steps.generation, None, None
    encoded = view.fresh.get("status as JSON", lambda: RunStatus.model_validate(status).model_dump_json().encode())
    view.refresh()
    news = []
    for line in _lines_beyond(view.steps, cursor.step):
        cursor.step = line["step"]
        news.append(_event("step", json.dumps(line).encode(), cursor))
    for line in _lines_beyond(view.eval, cursor.eval):
        cursor.eval = line["step"]
        news.append(_event("eval", json.dumps(line).encode(), cursor))
    notes = view.fresh.get("notes", lambda: plane.runs.store.notes(view.run_id, limit=MOST_NOTES))
    for note in notes:
        if note.id > cursor.note:
            cursor.note = note.id
            text = Note.model_validate(note, from_attributes=True).model_dump_json()
            news.append(_event("note", text.encode(), cursor))
    return news, view.steps.generation, RunState(status["state"]), encoded


def _lines_beyond(curve: Curve, step: int) -> Iterator[dict[str, Any]]:
    """The curve's last lines beyond a step, in order; a curve that was cut back to before it begins anew."""
    recent = list(curve.recent)
    first = len(recent)
    while first and recent[first - 1]["step"] > step:
        first -= 1
    yield from islice(recent, first, None)


def _event(kind: str, data: bytes, cursor: Cursor) -> bytes:
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind.encode(), cursor.id.encode(), data)
