"""Transport of a queue client: how a request reaches the queue and its reply comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

Reply = tuple[m.AnyReply, list[Buffer]]
"""A reply and the buffers of its columns."""


class Transport(ABC):
    """Connection to one queue, safe to use from several threads.

    Attributes:
        url: Address of the queue, for messages.
    """

    url: str

    @abstractmethod
    def exchange(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> Reply:
        """Send a request, again on a new connection if its reply is lost, and return the reply.

        Args:
            request: The message.
            buffers: Buffers of its columns.
            wait_s: How long the queue may hold the request back; the transport's own deadline comes on top.

        Raises:
            QueueUnreachableError: No reply came in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection without ending the session."""
