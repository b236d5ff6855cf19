"""Response of a call: a reply message with its columns."""

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
        """Write the columns' heads into the reply and return the buffers that follow its header."""
        if not self.columns:
            return []
        heads, buffers = pack_columns(self.columns)
        if not isinstance(self.reply, (Rows, Claimed, WindowRows)):
            raise TypeError(f"{type(self.reply).__name__} has no columns")
        self.reply.columns = heads
        return buffers
