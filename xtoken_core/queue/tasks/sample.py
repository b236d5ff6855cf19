"""One sample, the tasks that it is for, and the leases on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import msgspec

Order = Literal["strict", "arrival", "by_id"]


class Status(IntEnum):
    """How far a task is with a sample."""

    WAITING = 0
    READY = 1
    LEASED = 2
    DONE = 3


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer: it sees a sample once all of `requires` are produced.

    `strict` hands samples out in the order in which they were put, and waits for one that is not ready; `arrival` in
    the order in which they became ready; a `by_id` task is only claimed by ids.
    """

    name: str
    requires: frozenset[str]
    order: Order = "strict"


class Sample(msgspec.Struct, gc=False):
    """What is known of one sample. `put_at` is its place in the order of puts.

    `status` goes by task name; samples may share it, so it is replaced, never changed. A struct, since there are many.
    """

    id: int
    put_at: int
    fields: frozenset[str]
    status: Mapping[str, Status]
    attempts: int = 0

    def mark(self, task: str, status: Status) -> None:
        """Set how far a task is with it."""
        self.status = {**self.status, task: status}


@dataclass(slots=True)
class Lease:
    """Samples of a task that a session works on; `ids` are those not yet acked or given back."""

    id: int
    session: str
    task: str
    ids: tuple[int, ...]
    claimed: tuple[int, ...] = field(default=())
