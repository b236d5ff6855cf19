"""A sample, the tasks that consume it, and the leases on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import msgspec

Order = Literal["strict", "arrival", "by_id"]


class Status(IntEnum):
    """State of a sample for one task."""

    WAITING = 0
    READY = 1
    LEASED = 2
    DONE = 3


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer: it sees a sample once all fields of `requires` are produced.

    Order `strict` hands samples out in the order in which they were put, and waits for one that is not ready;
    `arrival` in the order in which they became ready; a `by_id` task is only claimed by ids.
    """

    name: str
    requires: frozenset[str]
    order: Order = "strict"


class Sample(msgspec.Struct, gc=False):
    """Bookkeeping of one sample, a struct because there are many.

    Attributes:
        id: Its id.
        put_at: Number of the put that created it, which orders strict tasks.
        fields: Fields that are produced.
        status: State by task name; shared between samples, so it is replaced and never changed.
        attempts: Refusals so far.
    """

    id: int
    put_at: int
    fields: frozenset[str]
    status: Mapping[str, Status]
    attempts: int = 0


@dataclass(slots=True)
class Lease:
    """Samples of a task that a session works on; `ids` are those not yet acked or given back."""

    id: int
    session: str
    task: str
    ids: tuple[int, ...]
    claimed: tuple[int, ...] = field(default=())
