"""What a queue must answer: a plain model of proto/README.md, sections 4 to 7, that shares no code with the server.

Sessions and leases go by names of the model's own. A column is `(kind, dtype, item_shape, rows)` as in the reference
client. A refusal is a set of codes, for where a request is wrong in several ways any of them may be told.
"""

import itertools
from typing import Any

from tests.contract.oracle_partition import Answer, Part, Refused, Waits
from tests.contract.oracle_run import RunPart

READS = {"heartbeat", "get", "room", "list", "peek", "stats", "window", "await_trainer", "check_step"}
METHODS = {"window": "window_rows"}
FOUND_AGAIN = {"claim_slot", "claim_batch"}


class Oracle:
    """A queue of `limit` bytes at the time `now`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.now = limit, 0.0
        self.sessions: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, Part | RunPart] = {}
        self.lanes: dict[tuple[str, str], tuple[int, Answer]] = {}
        self.hellos: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def advance(self, seconds: float) -> None:
        """Time passes; those who were silent for longer than they said are gone."""
        self.now += seconds
        for name in [n for n, s in self.sessions.items() if self.now - s["seen"] > s["silence_s"]]:
            self.end(name)

    def restart(self) -> None:
        """The queue's process has died, and another one has read its journal: what was answered is there."""
        for name in list(self.sessions):
            self.end(name)
        self.hellos.clear()
        for part in self.parts.values():
            assert isinstance(part, Part)
            part.restart()

    def end(self, session: str) -> None:
        """A session ends."""
        del self.sessions[session]
        for key in [key for key in self.lanes if key[0] == session]:
            del self.lanes[key]
        for part in self.parts.values():
            part.session_ended(session)

    def handle(self, session: str, request: str, kind: str, f: dict[str, Any]) -> Answer:
        """The answer to a request; `{"codes"}` if it is refused, `{"type": "empty"}` if it would have to wait."""
        try:
            return self._handle(session, request, kind, f)
        except Refused as refused:
            return {"codes": refused.codes, "detail": refused.detail}
        except Waits:
            if not f.get("wait_s"):  # its time is over at once
                self._keep(session, request, kind, {"type": "empty"})
            return {"type": "empty"}

    def retry(self, session: str, request: str, kind: str, f: dict[str, Any]) -> Answer:
        """The answer to a request that was heard before and waits: no sign of life."""
        seen = self.sessions.get(session, {}).get("seen")
        answer = self.handle(session, request, kind, f)
        if session in self.sessions:
            self.sessions[session]["seen"] = seen
        return answer

    def _handle(self, session: str, request: str, kind: str, f: dict[str, Any]) -> Answer:
        if kind == "hello":
            return self._hello(request, f)
        if session not in self.sessions:
            raise Refused("stale_session")
        self.sessions[session]["seen"] = self.now
        lane, number = request.rsplit(".")
        last, answer = self.lanes.get((session, lane), (-1, {}))
        if int(number) < last:
            raise Refused("bad_request")
        if int(number) == last:
            if answer["type"] == "claimed":
                return {**answer, "columns": self.parts[f["partition"]].read(answer["ids"], f.get("fields", []))}
            return answer
        answer = self._answer(session, kind, f)
        if kind != "bye":
            self._keep(session, request, kind, answer)
        return answer

    def _keep(self, session: str, request: str, kind: str, answer: Answer) -> None:
        if kind not in READS | FOUND_AGAIN:
            lane, number = request.rsplit(".")
            self.lanes[session, lane] = (int(number), answer)

    def _hello(self, request: str, f: dict[str, Any]) -> Answer:
        same = {n: s for n, s in self.sessions.items() if (s["name"], s["role"]) == (f["name"], f["role"])}
        for name in same:
            if self.hellos[name] == request:
                return {"type": "welcome", "session": name}
        if any(s["incarnation"] > f["incarnation"] for s in same.values()):
            raise Refused("stale_session")
        for name in same:
            self.end(name)
        name = f"session {next(self._numbers)}"
        self.sessions[name] = {**f, "seen": self.now}
        self.hellos[name] = request
        return {"type": "welcome", "session": name}

    def _answer(self, session: str, kind: str, f: dict[str, Any]) -> Answer:
        if kind == "heartbeat":
            return {"type": "ok"}
        if kind == "bye":
            self.end(session)
            return {"type": "ok"}
        name = f["partition"]
        if kind == "open":
            definition = (f["tasks"], f["volatile"], f["max_attempts"])
            if name in self.parts and self.parts[name].definition != definition:
                raise Refused("conflict")
            if name not in self.parts:
                self.parts[name] = RunPart(self, f) if "run" in f else Part(self, *definition)
            return {"type": "ok"}
        if name not in self.parts:
            raise Refused("unknown_partition")
        answer: Answer = getattr(self.parts[name], METHODS.get(kind, kind))(session, f)
        return answer

    @property
    def bytes(self) -> int:
        """Bytes of all buffers held."""
        return sum(part.bytes for part in self.parts.values())

    def stats(self) -> Answer:
        """What the statistics must say, as far as it is modelled."""
        mine = [(s["name"], s["role"], s["incarnation"]) for s in self.sessions.values()]
        return {"bytes": self.bytes, "sessions": mine, "partitions": {n: p.stats() for n, p in self.parts.items()}}
