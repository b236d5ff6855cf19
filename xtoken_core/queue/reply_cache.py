"""The answers that may be asked for again: the last one of each lane, so that a lost reply costs nothing.

A request id is `lane.number`, or just a lane. A client has one request open per lane, so a new one in a lane says that
the answer to the one before has arrived, and that answer is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

from xtoken_core.queue.response import Response

LANES = 256


def lane_of(request: str) -> str:
    """The lane of a request id: what stands before its last dot, or all of it."""
    lane, dot, _ = request.rpartition(".")
    return lane if dot else request


class ReplyCache:
    """The last answer of every lane of every session; of a session with too many lanes, the latest ones."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, tuple[str, Response]]] = {}

    def recall(self, session: str, request: str) -> Response | None:
        """The answer to this very request, if it was answered and nothing has been asked in its lane since."""
        kept = self._kept.get(session)
        known = kept.get(lane_of(request)) if kept is not None else None
        return known[1] if known is not None and known[0] == request else None

    def remember(self, session: str, request: str, answer: Response) -> None:
        """Keep an answer in place of the lane's last one; its columns are not kept."""
        kept = self._kept.setdefault(session, OrderedDict())
        lane = lane_of(request)
        kept[lane] = (request, Response(answer.reply))
        kept.move_to_end(lane)
        while len(kept) > LANES:
            kept.popitem(last=False)

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._kept.pop(session, None)
