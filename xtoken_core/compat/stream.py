"""Stream of a task's samples: claimed in the background, acknowledged by the loop, given back if it ends early."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from xtoken_core.errors import StaleSessionError
from xtoken_core.wire import Column, QueueError

if TYPE_CHECKING:
    from xtoken_core.compat.task_client import TaskClient

T = TypeVar("T")
POLL_S = 1.0
"""How often a waiting claim checks whether the stream was closed."""


class Delivery(Generic[T]):
    """Samples that are leased to this stream.

    Attributes:
        ids: The samples.
        value: Result of the stream's `make` on their columns.
        lease: Their lease.
    """

    def __init__(self, client: TaskClient, partition: str, task: str, lease: int, ids: list[int], value: T):
        self.ids = ids
        self.value = value
        self.lease = lease
        self._client, self._partition, self._task = client, partition, task
        self._tried = self._finished = False

    def complete(self, columns: Mapping[str, Column]) -> None:
        """Put a result for these samples and acknowledge them, in one request."""
        self._finish(lambda: self._client.complete(self._partition, self.lease, columns))

    def nack(self, ids: Sequence[int], reason: str) -> None:
        """Refuse some of these samples; the others are given back uncounted."""
        self._finish(lambda: self._client.nack(self._partition, self.lease, ids, reason))

    def ack(self) -> None:
        """Acknowledge these samples, unless they were completed or refused; give them back if that has failed."""
        if self._tried:
            self.give_back()
        else:
            self._finish(lambda: self._client.ack(self._partition, self._task, self.ids))

    def give_back(self) -> None:
        """Give these samples back, unless they were completed, refused or acknowledged."""
        if not self._finished:
            self._finish(lambda: _give_back(self._client, self._partition, self.lease))

    def _finish(self, send: Callable[[], None]) -> None:
        """Send the request that ends the lease. If it fails and the lease stands, the samples stay unfinished."""
        self._tried = True
        try:
            send()
        except (QueueError, StaleSessionError) as error:
            if isinstance(error, StaleSessionError) or error.code == "lease_revoked":
                self._finished = True
            raise
        self._finished = True


def _give_back(client: TaskClient, partition: str, lease: int) -> None:
    """Give the samples of a lease back, unless it was revoked."""
    try:
        client.nack(partition, lease, [], "given back")
    except QueueError as error:
        if error.code != "lease_revoked":
            raise


class Stream(Generic[T]):
    """Iterable of `TaskClient.stream`; leaving its `for` loop, or `close`, gives back unfinished samples.

    Args:
        client: Client whose session holds the leases.
        make: Turns ids and columns into a delivery's value, in the background if there is a prefetch.
    """

    def __init__(
        self,
        client: TaskClient,
        partition: str,
        task: str,
        *,
        count: int,
        fields: Sequence[str],
        wait_s: float | None,
        prefetch: int,
        make: Callable[[list[int], dict[str, Column]], T],
    ) -> None:
        self._client, self._partition, self._task = client, partition, task
        self._count, self._fields, self._wait_s, self._make = count, list(fields), wait_s, make
        self._prefetch = prefetch
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Delivery[T]]:
        source = self._ahead() if self._prefetch else self._claims()
        current: Delivery[T] | None = None
        try:
            for current in source:
                yield current
                current.ack()
        finally:
            self.close()
            try:
                if current is not None:
                    current.give_back()
            finally:
                source.close()

    def close(self) -> None:
        """Stop claiming."""
        self._closed.set()

    def _claims(self) -> Generator[Delivery[T], None, None]:
        while (delivery := self._claim()) is not None:
            yield delivery

    def _claim(self) -> Delivery[T] | None:
        deadline = None if self._wait_s is None else time.monotonic() + self._wait_s
        while not self._closed.is_set():
            left = POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))
            try:
                claimed = self._client.claim(
                    self._partition, self._task, count=self._count, fields=self._fields, wait_s=left
                )
            except QueueError as error:
                if error.code == "exhausted":
                    return None
                raise
            if claimed is not None:
                claim, columns = claimed
                try:
                    value = self._make(claim.ids, columns)
                except BaseException:
                    _give_back(self._client, self._partition, claim.lease)
                    raise
                return Delivery(self._client, self._partition, self._task, claim.lease, claim.ids, value)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"nothing for task {self._task!r} of {self._partition!r} in {self._wait_s:g} s")
        return None

    def _ahead(self) -> Generator[Delivery[T], None, None]:
        """Yield the claims of a thread that is up to `prefetch` deliveries ahead."""
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
            self._closed.set()
            thread.join()
            while not ready.empty():
                item = ready.get_nowait()
                if isinstance(item, Delivery):
                    item.give_back()

    def _offer(
        self, ready: queue.Queue[Delivery[T] | BaseException | None], item: Delivery[T] | BaseException | None
    ) -> None:
        """Queue an item for the loop; after the stream was closed, give a delivery back."""
        while not self._closed.is_set():
            try:
                ready.put(item, timeout=POLL_S / 4)
            except queue.Full:
                continue
            return
        if isinstance(item, Delivery):
            item.give_back()
