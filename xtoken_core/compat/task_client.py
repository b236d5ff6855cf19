"""Client of the generic task queue: partitions, samples and tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from xtoken_core.data_plane.queue_client import QueueClient
from xtoken_core.wire import Column, QueueError, pack_columns, unpack_columns
from xtoken_core.wire import messages as m

PAUSE_S = 0.02


class TaskClient(QueueClient):
    """Calls of the generic task queue. Training itself uses `RunClient` and needs none of them."""

    def open(
        self,
        partition: str,
        tasks: Sequence[m.TaskDef] = (),
        *,
        volatile: Sequence[str] = (),
        max_attempts: int = 3,
        run: m.RunDef | None = None,
    ) -> None:
        """Open a partition; opening it again with the same definition is not an error."""
        request = m.OpenPartition(
            **self.head(partition), tasks=list(tasks), volatile=list(volatile), max_attempts=max_attempts, run=run
        )
        self.ask(request, m.Ok)

    def seal(self, partition: str) -> None:
        """Seal a partition: nothing will be put any more."""
        self.ask(m.Seal(**self.head(partition)), m.Ok)

    def clear(self, partition: str, ids: Sequence[int] | None = None) -> None:
        """Drop these samples, or all of them if None."""
        request = m.Clear(**self.head(partition), ids=list(ids or ()), everything=ids is None)
        self.ask(request, m.Ok)

    # Samples

    def put(self, partition: str, ids: Sequence[int], columns: Mapping[str, Column], *, wait_s: float = 0.0) -> int:
        """Store columns for ids; return the bytes of room left.

        With too little room it waits up to `wait_s` for more, and sends nothing meanwhile.

        Raises:
            QueueError: `no_room` if there was too little all that time.
        """
        heads, buffers = pack_columns(dict(columns))
        deadline, pause = time.monotonic() + wait_s, 0.0
        while True:
            request = m.Put(**self.head(partition), ids=list(ids), columns=heads, lease=None, tombstones={})
            try:
                return self.ask(request, m.Stored, buffers)[0].room
            except QueueError as error:
                left = deadline - time.monotonic()
                size = sum(buffer.nbytes for buffer in buffers)
                if error.code != "no_room" or left <= 0 or self.room(partition, size, wait_s=left) is None:
                    raise
                time.sleep(min(pause, left))  # refused again although there is room: others may be faster
                pause = PAUSE_S

    def room(self, partition: str, nbytes: int, *, wait_s: float) -> int | None:
        """Wait until `nbytes` are free; return the number of free bytes."""
        stored = self.wait(lambda s: m.Room(**self.head(partition), bytes=nbytes, wait_s=s), m.Stored, wait_s)
        return stored[0].room if stored else None

    def get(
        self, partition: str, ids: Sequence[int], fields: Sequence[str], *, wait_s: float = 0.0
    ) -> dict[str, Column] | None:
        """Read fields of samples, rows in the order of `ids`."""
        rows = self.wait(
            lambda s: m.Get(**self.head(partition), ids=list(ids), fields=list(fields), wait_s=s), m.Rows, wait_s
        )
        return unpack_columns(rows[0].columns, rows[1]) if rows else None

    def claim(
        self,
        partition: str,
        task: str,
        *,
        ids: Sequence[int] = (),
        count: int = 0,
        fields: Sequence[str] = (),
        wait_s: float = 0.0,
    ) -> tuple[m.Claimed, dict[str, Column]] | None:
        """Lease samples of a task, by ids or up to `count` in the task's order, and read fields of them."""
        return self.wait_for_claim(
            lambda s: m.Claim(
                **self.head(partition), task=task, ids=list(ids), count=count, fields=list(fields), wait_s=s
            ),
            wait_s,
        )

    def complete(self, partition: str, lease: int, columns: Mapping[str, Column] | None = None) -> None:
        """Put a lease's result and finish the lease, in one request."""
        heads, buffers = pack_columns(dict(columns or {}))
        request = m.Complete(**self.head(partition), lease=lease, columns=heads)
        self.ask(request, m.Ok, buffers)

    def ack(self, partition: str, task: str, ids: Sequence[int]) -> None:
        """Mark leased samples as done by a task."""
        self.ask(m.Ack(**self.head(partition), task=task, ids=list(ids)), m.Ok)

    def nack(self, partition: str, lease: int, ids: Sequence[int], reason: str) -> None:
        """Refuse samples of a lease; the others are given back."""
        request = m.Nack(**self.head(partition), lease=lease, ids=list(ids), reason=reason[:4096])
        self.ask(request, m.Ok)


DataPlaneClient = TaskClient
"""Name of the client in the public interface."""
