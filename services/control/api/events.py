"""A run's news as server-sent events: what changes, when it changes, from the same views as every other answer."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query
from fastapi.responses import StreamingResponse

from services.control.api.plane import Plane, RunId, ThePlane, problems_of
from services.control.api.streams import Encoded, Look, Streams
from services.control.views import View

STATUS_S = 2.0
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
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

    def cut_back(self, look: Look) -> None:
        """The curves were read anew: who is told so reads them too, and wants what comes after."""
        self.step = min(self.step, look.steps[-1][0] if look.steps else -1)
        self.eval = min(self.eval, look.eval[-1][0] if look.eval else -1)


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
    generation = view.steps.generation
    told_at, sent_at, told, look = 0.0, time.monotonic(), None, None
    async with plane.streams.feed(view, plane.runs.store) as feed:
        while True:
            look = await feed.next(look)
            news = []
            if look.state is not None and look.generation != generation:
                generation = look.generation
                cursor.cut_back(look)
                news.append(_event("rewound", b"{}", cursor))
            now = time.monotonic()
            if look.state is not None and (look.state != told or now - told_at >= STATUS_S):
                told_at, told = now, look.state
                news.append(_event("status", look.status, cursor))
            news += _beyond(look, cursor)
            over = look.state is None or look.state.over
            if over:
                news.append(_event("end", b"{}", cursor))
            elif not news and now - sent_at > KEEP_ALIVE_S:
                news.append(b": still here\n\n")
            if news:
                sent_at = now
                yield b"".join(news)
            if over:
                return


def _beyond(look: Look, cursor: Cursor) -> Iterator[bytes]:
    """What a stream has not sent; the cursor goes along."""
    for step, line in _after(look.steps, cursor.step):
        cursor.step = step
        yield _event("step", line, cursor)
    for step, line in _after(look.eval, cursor.eval):
        cursor.eval = step
        yield _event("eval", line, cursor)
    for number, note in _after(look.notes, cursor.note):
        cursor.note = number
        yield _event("note", note, cursor)


def _after(lines: Encoded, place: int) -> Encoded:
    """The lines beyond a place, in order; looked for from their end, where the news are."""
    first = len(lines)
    while first and lines[first - 1][0] > place:
        first -= 1
    return lines[first:]


def _event(kind: str, data: bytes, cursor: Cursor) -> bytes:
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind.encode(), cursor.id.encode(), data)
