"""Fields that all messages have, and the bounded types of fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

from xtoken_core.wire.bounds import MAX_COLUMNS, MAX_DOCUMENT_BYTES, MAX_IDS, MAX_ROWS, MAX_TEXT, MAX_TOKEN, MAX_WAIT_S
from xtoken_core.wire.columns import ColumnHead, Id, Name

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN)]
SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN)]
Ids = Annotated[list[Id], msgspec.Meta(max_length=MAX_IDS)]
"""Ids in a request."""
ManyIds = Annotated[list[Id], msgspec.Meta(max_length=MAX_ROWS)]
"""Ids in a reply."""
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_COLUMNS)]
Heads = Annotated[list[ColumnHead], msgspec.Meta(max_length=MAX_COLUMNS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Reasons = Annotated[dict[Id, Text], msgspec.Meta(max_length=MAX_ROWS)]
Document = Annotated[bytes, msgspec.Meta(max_length=MAX_DOCUMENT_BYTES)]
Handle = Annotated[bytes, msgspec.Meta(max_length=MAX_TEXT)]


class Request(msgspec.Struct, tag_field="type", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields of every request."""

    id: RequestId


class SessionRequest(Request, kw_only=True):
    """A request inside a session."""

    session: SessionId


class PartitionRequest(SessionRequest, kw_only=True):
    """A request about one partition."""

    partition: Name


class Reply(msgspec.Struct, tag_field="type", kw_only=True, omit_defaults=True):
    """Fields of every reply."""

    id: RequestId = ""
