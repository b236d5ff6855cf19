"""Sessions of workers: one per name, role and incarnation, ended by bye, by a newer incarnation, or by silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2s

from xtoken_core.wire import QueueError

ENDED_KEPT = 256


@dataclass(slots=True)
class Session:
    """Session of one worker.

    Attributes:
        id: Secret of its worker: it is all that a request in the session needs.
        public_id: Digest of the id, which names the session to other workers and in the statistics.
        silence: Seconds without a request after which it ends.
        last_seen: Time of its last request, on the server's clock.
        progress: Units of work it has reported.
        progress_at: Time at which that number last grew.
        activity: Description of work that takes long; empty for steps.
        ended: Reason for which it ended; empty while it lives.
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
    activity: str = ""
    ended: str = ""
    public_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.public_id = blake2s(self.id.encode(), digest_size=8).hexdigest()


class Sessions:
    """Living sessions, and the most recently ended ones, whose workers get the reason.

    Attributes:
        on_end: Callbacks with the id of every session that ends.
    """

    def __init__(self) -> None:
        self.on_end: list[Callable[[str], None]] = []
        self.live: dict[str, Session] = {}
        self.ended: dict[str, Session] = {}

    def open(self, session: Session) -> list[Session]:
        """Add a session; end and return older incarnations of the same worker.

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
        """Return a living session.

        Raises:
            QueueError: `stale_session`, with the reason it ended.
        """
        known = self.live.get(session)
        if known is None:
            old = self.ended.get(session)
            why = f"the session of {old.role} {old.name!r} has ended: {old.ended}" if old else "unknown session"
            raise QueueError("stale_session", why)
        return known

    def end(self, session: str, why: str) -> Session | None:
        """End a session; None if it had ended already."""
        known = self.live.pop(session, None)
        if known is not None:
            known.ended = why
            self.ended[session] = known
            # Dictionaries keep the order of insertion: the first one ended longest ago.
            while len(self.ended) > ENDED_KEPT:
                self.ended.pop(next(iter(self.ended)))
            # After the session has left `live`: a callback finds it ended, and what it gives back goes to others.
            for callback in self.on_end:
                callback(session)
        return known

    def silent(self, now: float) -> list[Session]:
        """Return the sessions that have been silent for longer than their limit."""
        return [s for s in self.live.values() if now - s.last_seen > s.silence]
