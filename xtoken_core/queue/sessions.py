"""Who is connected: one session per (name, role, incarnation), ended by bye, by a newer one, or by silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xtoken_core.wire import QueueError

ENDED_KEPT = 256


@dataclass(slots=True)
class Session:
    """One worker's stay.

    Attributes:
        silence: Seconds without a sign of life after which it ends.
        last_seen: When it last sent anything, on the server's clock.
        progress: Units of work it has reported.
        progress_at: When that number last grew.
        ended: Why it ended; empty while it lives.
    """

    id: str
    name: str
    role: str
    incarnation: int
    rank: int
    silence: float
    last_seen: float
    phase: str = "start"
    progress: int = 0
    progress_at: float = 0.0
    ended: str = ""


class Sessions:
    """All living sessions, and the last ended ones so that their workers can be told.

    Attributes:
        on_end: Called with the id of every session that ends.
    """

    def __init__(self) -> None:
        self.on_end: list[Callable[[str], None]] = []
        self.live: dict[str, Session] = {}
        self.ended: dict[str, Session] = {}

    def open(self, session: Session) -> list[Session]:
        """Add a session; returns older incarnations of the same worker, which it ends.

        Raises:
            QueueError: `stale_session` if a newer incarnation lives.
        """
        same = [s for s in self.live.values() if (s.name, s.role) == (session.name, session.role)]
        if any(s.incarnation > session.incarnation for s in same):
            raise QueueError("stale_session", f"a newer {session.role} called {session.name!r} is connected")
        for old in same:
            self.end(old.id, "replaced by a newer incarnation")
        self.live[session.id] = session
        return same

    def get(self, session: str) -> Session:
        """The living session.

        Raises:
            QueueError: `stale_session`, with the reason it ended.
        """
        found = self.live.get(session)
        if found is None:
            old = self.ended.get(session)
            why = f"the session of {old.role} {old.name!r} has ended: {old.ended}" if old else "unknown session"
            raise QueueError("stale_session", why)
        return found

    def end(self, session: str, why: str) -> Session | None:
        """End a session; None if it had ended already."""
        found = self.live.pop(session, None)
        if found is not None:
            found.ended = why
            self.ended[session] = found
            while len(self.ended) > ENDED_KEPT:
                self.ended.pop(next(iter(self.ended)))
            for tell in self.on_end:
                tell(session)
        return found

    def silent(self, now: float) -> list[Session]:
        """Sessions that have been silent for longer than they said."""
        return [s for s in self.live.values() if now - s.last_seen > s.silence]
