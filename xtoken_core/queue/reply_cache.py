"""Cache of the last reply of each lane, so that a repeated request gets the same reply and changes nothing.

A request id is `lane.number`, or just a lane. A client has one request open per lane: a new request in a lane means
that the reply to the previous one has arrived, and that reply is dropped.
"""

from __future__ import annotations

from collections import OrderedDict

from xtoken_core.queue.response import Response
from xtoken_core.wire.bounds import MAX_LANES


def lane_of(request: str) -> str:
    """Return the lane of a request id: everything before its last dot, or all of it."""
    lane, dot, _ = request.rpartition(".")
    return lane if dot else request


class ReplyCache:
    """Last reply per session and lane, limited to each session's most recent lanes."""

    def __init__(self) -> None:
        self._lanes: dict[str, OrderedDict[str, tuple[str, Response]]] = {}

    def get(self, session: str, request: str) -> Response | None:
        """Return the reply to exactly this request, if it is still the last one of its lane."""
        lanes = self._lanes.get(session)
        cached = lanes.get(lane_of(request)) if lanes is not None else None
        return cached[1] if cached is not None and cached[0] == request else None

    def put(self, session: str, request: str, response: Response) -> None:
        """Replace the lane's reply; columns are not kept."""
        lanes = self._lanes.setdefault(session, OrderedDict())
        lane = lane_of(request)
        lanes[lane] = (request, Response(response.reply))
        lanes.move_to_end(lane)
        while len(lanes) > MAX_LANES:
            lanes.popitem(last=False)

    def drop(self, session: str) -> None:
        """Drop all replies of an ended session."""
        self._lanes.pop(session, None)
