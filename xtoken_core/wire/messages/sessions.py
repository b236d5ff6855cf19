"""Messages about sessions, and the replies without content."""

from __future__ import annotations

from typing import Annotated

import msgspec

from xtoken_core.wire.bounds import MAX_NAME, MAX_SILENCE_S
from xtoken_core.wire.columns import Id, Name
from xtoken_core.wire.messages.base import Document, Index, Reply, Request, Seconds, SessionId, SessionRequest, Text


class Hello(Request, tag="hello", kw_only=True):
    """Open a session. It waits up to `wait_s` for a run to be open, if `needs_run`."""

    versions: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]
    name: Name
    role: Name
    incarnation: Id
    rank: Index = 0
    silence_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SILENCE_S)] = 30.0
    needs_run: bool = False
    wait_s: Seconds = 0.0


class Welcome(Reply, tag="welcome", kw_only=True):
    """The session and the queue's memory limit; with a run open, its partition and resolved specification (JSON)."""

    session: SessionId
    version: int
    partition: str = ""
    run: Document = b""
    memory_limit: Annotated[int, msgspec.Meta(ge=0)] = 0


class Heartbeat(SessionRequest, tag="heartbeat", kw_only=True):
    """Keep a session alive; `progress` counts units of finished work, `activity` describes work that takes long."""

    phase: Name
    progress: Id = 0
    activity: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class Bye(SessionRequest, tag="bye", kw_only=True):
    """End the session."""


class Ok(Reply, tag="ok", kw_only=True):
    """Done."""


class Empty(Reply, tag="empty", kw_only=True):
    """The wait ended and there was nothing: ask again."""


class Failure(Reply, tag="error", kw_only=True):
    """Refused; `code` is one of `xtoken_core.wire.errors.CODES`."""

    code: Name
    message: Text
    detail: dict[str, int] = {}


SessionRequests = Hello | Heartbeat | Bye
SessionReplies = Welcome | Ok | Empty | Failure
