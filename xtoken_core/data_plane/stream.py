"""A task's samples as a stream: claimed in the background, acknowledged as the loop goes on, given back if it ends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from xtoken_core.wire import Column, QueueError

if TYPE_CHECKING:
    from xtoken_core.data_plane.task_client import TaskClient

T = TypeVar("T")
LOOK_S = 1.0
"""How often a waiting claim looks whether the stream was left."""


class Delivery(Generic[T]):
    """Samples that are leased to this stream.

    Attributes:
        ids: The samples.
        value: What the stream makes of their columns.
        lease: Their lease.
    """

    def __init__(self, client: TaskClient, partition: str, task: str, lease: int, ids: list[int], value: T):
        self.ids = ids
        self.value = value
        self.lease = lease
        self._client, self._partition, self._task = client, partition, task
        self._finished = False

    def complete(self, columns: Mapping[str, Column]) -> None:
        """Put a result for these samples and be done with them, in one request."""
        self._finished = True
        self._client.complete(self._partition, self.lease, columns)

    def nack(self, ids: Sequence[int], reason: str) -> None:
        """Some of these samples could not be done; the others go back uncounted."""
        self._finished = True
        self._client.nack(self._partition, self.lease, ids, reason)

    def ack(self) -> None:
        """Be done with these samples, if nothing was said of them yet."""
        if not self._finished:
            self._finished = True
            self._client.ack(self._partition, self._task, self.ids)

    def give_back(self) -> None:
        """Let somebody else have them, if nothing was said of them yet."""
        if not self._finished:
            self.nack([], "given back")


class Stream(Generic[T]):
    """What `TaskClient.stream` returns; leaving its `for` loop, or `close`, gives back what is not done.

    Args:
        client: Whose session holds the leases.
        make: Turns columns into what the consumer wants, in the background if there is a prefetch.
    """

    def __init__(
        self, client: TaskClient, partition: str, task: str, *, count: int, fields: Sequence[str],
        wait_s: float | None, prefetch: int, make: Callable[[list[int], dict[str, Column]], T],
    ) -> None:  # fmt: skip
        self._client, self._partition, self._task = client, partition, task
        self._count, self._fields, self._wait_s, self._make = count, list(fields), wait_s, make
        self._prefetch = prefetch
        self._left = threading.Event()

    def __iter__(self) -> Iterator[Delivery[T]]:
        source = self._ahead() if self._prefetch else self._claims()
        current: Delivery[T] | None = None
        try:
            for current in source:
                yield current
                current.ack()
        finally:
            self.close()
            if current is not None:
                current.give_back()
            source.close()

    def close(self) -> None:
        """Claim nothing more."""
        self._left.set()

    def _claims(self) -> Generator[Delivery[T], None, None]:
        while (delivery := self._claim()) is not None:
            yield delivery

    def _claim(self) -> Delivery[T] | None:
        deadline = None if self._wait_s is None else time.monotonic() + self._wait_s
        while not self._left.is_set():
            left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            try:
                found = self._client.claim(
                    self._partition, self._task, count=self._count, fields=self._fields, wait_s=left
                )
            except QueueError as error:
                if error.code == "exhausted":
                    return None
                raise
            if found is not None:
                claim, columns = found
                value = self._make(claim.ids, columns)
                return Delivery(self._client, self._partition, self._task, claim.lease, claim.ids, value)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"nothing for task {self._task!r} of {self._partition!r} in {self._wait_s:g} s")
        return None

    def _ahead(self) -> Generator[Delivery[T], None, None]:
        """The claims of a thread that is up to `prefetch` deliveries ahead."""
        ready: queue.Queue[Delivery[T] | BaseException | None] = queue.Queue(self._prefetch)

        def work() -> None:
            try:
                for delivery in self._claims():
                    self._offer(ready, delivery)
            except BaseException as error:
                self._offer(ready, error)
            self._offer(ready, None)

        thread = threading.Thread(target=work, name=f"stream {self._task}", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._left.set()
            thread.join()
            while not ready.empty():
                item = ready.get_nowait()
                if isinstance(item, Delivery):
                    item.give_back()

    def _offer(
        self, ready: queue.Queue[Delivery[T] | BaseException | None], item: Delivery[T] | BaseException | None
    ) -> None:
        """Hand an item over; once the stream was left, nobody takes it and a delivery goes back."""
        while not self._left.is_set():
            try:
                ready.put(item, timeout=LOOK_S / 4)
            except queue.Full:
                continue
            return
        if isinstance(item, Delivery):
            item.give_back()
