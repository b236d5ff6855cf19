"""Cache of the last reply of each lane, so that a repeated request gets the same reply and changes nothing.

A request id is `lane.number`, or just a lane. A client has one request open per lane, with rising numbers: a new one
means that the reply to the previous one has arrived, and that reply is dropped. A lower one is a late copy.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from xtoken_core.queue.budget import Budget, cost_of_reply
from xtoken_core.queue.response import Response
from xtoken_core.wire import QueueError
from xtoken_core.wire.bounds import MAX_LANES


def lane_of(request: str) -> str:
    """Return the lane of a request id: everything before its last dot, or all of it."""
    lane, dot, _ = request.rpartition(".")
    return lane if dot else request


class ReplyCache:
    """Last reply per session and lane, limited to each session's most recent lanes.

    All replies together are limited by the budget: beyond it, the session that holds most loses its oldest ones.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lanes: defaultdict[str, OrderedDict[str, tuple[str, Response, int]]] = defaultdict(OrderedDict)
        self._bytes: dict[str, int] = {}

    def get(self, session: str, request: str) -> Response | None:
        """Return the reply to exactly this request, if it is still the last one of its lane.

        Raises:
            QueueError: `bad_request` if a later request of the lane was answered.
        """
        last, reply, _ = self._lanes[session].get(lane_of(request)) or ("", None, 0)
        # By length, then as text: ids of a lane differ in their number only, which has no leading zeros.
        if (len(request), request) < (len(last), last):
            raise QueueError("bad_request", f"{request} comes after {last} was answered: a lane's numbers must rise")
        return reply if last == request else None

    def put(self, session: str, request: str, response: Response) -> None:
        """Replace the lane's reply; columns are not kept."""
        lanes, lane, cost = self._lanes[session], lane_of(request), cost_of_reply(response.reply)
        old = lanes.pop(lane, None)
        # Without columns: they are read again for a repeated claim, and a put's reply has none.
        lanes[lane] = (request, Response(response.reply), cost)
        if old is not None and old[2] == cost:
            return
        self._charge(session, cost - (0 if old is None else old[2]))
        if len(lanes) > MAX_LANES:
            self._drop_oldest(session)
        while self._budget.excess("replies") > 0:
            # Half of the largest holder's replies at once, so that one flooding client pays and the loop stays short.
            heaviest = max(self._bytes, key=self._bytes.__getitem__)
            enough = self._bytes[heaviest] // 2
            while self._bytes.get(heaviest, 0) > enough:
                self._drop_oldest(heaviest)

    def drop(self, session: str) -> None:
        """Drop all replies of an ended session."""
        self._lanes.pop(session, None)
        self._budget.add("replies", -self._bytes.pop(session, 0))

    def _drop_oldest(self, session: str) -> None:
        _, (_, _, cost) = self._lanes[session].popitem(last=False)
        self._charge(session, -cost)

    def _charge(self, session: str, nbytes: int) -> None:
        self._budget.add("replies", nbytes)
        self._bytes[session] = self._bytes.get(session, 0) + nbytes
