"""Sessions: who lives, who replaces whom, who is told."""

import pytest

from xtoken_core.queue.sessions import ENDED_KEPT, Session, Sessions
from xtoken_core.wire import QueueError


def stay(name: str, incarnation: int, *, role: str = "collator", last_seen: float = 0.0) -> Session:
    return Session(f"{role}/{name}/{incarnation}", name, role, incarnation, 0, silence=10.0, last_seen=last_seen)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


def test_a_newer_incarnation_ends_the_older_one(sessions: Sessions) -> None:
    told: list[str] = []
    sessions.on_end.append(told.append)
    sessions.open(stay("a", 1))
    assert [s.id for s in sessions.open(stay("a", 2))] == ["collator/a/1"]
    assert told == ["collator/a/1"]
    with pytest.raises(QueueError, match="replaced by a newer incarnation") as caught:
        sessions.get("collator/a/1")
    assert caught.value.code == "stale_session"
    assert sessions.get("collator/a/2").incarnation == 2


def test_a_session_ends_once(sessions: Sessions) -> None:
    told: list[str] = []
    sessions.on_end.append(told.append)
    sessions.open(stay("a", 1))
    assert sessions.end("collator/a/1", "bye") is not None
    assert sessions.end("collator/a/1", "silence") is None
    assert told == ["collator/a/1"]
    with pytest.raises(QueueError, match="has ended: bye"):
        sessions.get("collator/a/1")


def test_silence_beyond_the_limit(sessions: Sessions) -> None:
    sessions.open(stay("a", 1, last_seen=5.0))
    sessions.open(stay("b", 1, last_seen=8.0))
    assert sessions.silent(15.0) == []
    assert [s.name for s in sessions.silent(15.5)] == ["a"]


def test_only_the_last_ended_sessions_are_remembered(sessions: Sessions) -> None:
    for incarnation in range(ENDED_KEPT + 10):
        sessions.open(stay("a", incarnation))
    assert len(sessions.ended) == ENDED_KEPT
    assert "collator/a/0" not in sessions.ended
