"""What a call gives back: a reply, with columns beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from xtoken_core.wire import Column, pack_columns
from xtoken_core.wire.messages import Claimed, Reply, Rows, WindowRows


@dataclass(slots=True)
class Response:
    """A reply and the columns that travel beside it."""

    reply: Reply
    columns: dict[str, Column] = field(default_factory=dict)

    def frames(self) -> list[memoryview]:
        """The buffers to send after the header, into which the columns' heads are written."""
        if not self.columns:
            return []
        heads, buffers = pack_columns(self.columns)
        if not isinstance(self.reply, (Rows, Claimed, WindowRows)):
            raise TypeError(f"{type(self.reply).__name__} has no columns")
        self.reply.columns = heads
        return buffers
