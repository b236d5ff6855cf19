"""Messages about samples: put, read, claim and finish them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from xtoken_core.wire.bounds import MAX_IDS, MAX_NAME
from xtoken_core.wire.columns import Id, Name
from xtoken_core.wire.messages.base import (
    Document,
    Heads,
    Ids,
    Index,
    ManyIds,
    Names,
    PartitionRequest,
    Reasons,
    Reply,
    Seconds,
    SessionRequest,
    Text,
)


class Put(PartitionRequest, tag="put", kw_only=True):
    """Store columns for `ids`. With the `lease` of a block: its rows and tombstones, which finish it."""

    ids: Ids
    columns: Heads
    lease: Id | None = None
    tombstones: Reasons = {}


class Stored(Reply, tag="stored", kw_only=True):
    """Stored; `room` is how many bytes are left."""

    room: int


class Room(PartitionRequest, tag="room", kw_only=True):
    """Wait until so many bytes are free."""

    bytes: Id
    wait_s: Seconds = 0.0


class Get(PartitionRequest, tag="get", kw_only=True):
    """Read fields of samples; waits until all are there."""

    ids: Ids
    fields: Names
    wait_s: Seconds = 0.0


class Rows(Reply, tag="rows", kw_only=True):
    """Samples and their columns, in the order of `ids`."""

    ids: ManyIds
    columns: Heads


class Claim(PartitionRequest, tag="claim", kw_only=True):
    """Lease samples of a task, by `ids` (all or none) or up to `count` in the task's order."""

    task: Name
    ids: Ids = []
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_IDS)] = 0
    fields: Names = []
    wait_s: Seconds = 0.0


class SlotRef(msgspec.Struct, kw_only=True):
    """Slot that holds a teacher's signal for a claimed micro-batch: its row `i` belongs to sample `ids[i]`."""

    teacher: Index
    ring: Id
    slot: Index
    generation: Id


class Claimed(Reply, tag="claimed", kw_only=True):
    """A lease on `ids`: in a run all that were asked for, the `dead` included; in a task queue without the `dead`.

    For a teacher: the slot to fill. For a trainer: the slot of each teacher's signal (version 2).
    """

    lease: Id
    ids: ManyIds
    dead: ManyIds = []
    columns: Heads = []
    slot: int = -1
    generation: int = 0
    slots: Annotated[list[SlotRef], msgspec.Meta(max_length=64)] = []


class AlreadyDone(Reply, tag="already_done", kw_only=True):
    """Nothing to do: the task has done these samples."""


class Complete(PartitionRequest, tag="complete", kw_only=True):
    """Put the lease's result and finish the lease, in one request. Columns are rows of the lease's ids."""

    lease: Id
    columns: Heads = []


class Ack(PartitionRequest, tag="ack", kw_only=True):
    """The task has done these leased samples."""

    task: Name
    ids: Ids


class Nack(PartitionRequest, tag="nack", kw_only=True):
    """These samples of the lease could not be done; the others of the lease are given back."""

    lease: Id
    ids: Ids
    reason: Text


class ListSamples(PartitionRequest, tag="list", kw_only=True):
    """Ids in a state of a task (`waiting`, `ready`, `leased`, `done`), or `dead` or `skipped`, from `after` on."""

    task: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    state: Name
    after: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_IDS)] = 1024


class Listed(Reply, tag="listed", kw_only=True):
    """Ids, and reasons for those that have one."""

    ids: ManyIds
    reasons: Reasons = {}


class Peek(PartitionRequest, tag="peek", kw_only=True):
    """Describe one sample without changing it."""

    sample: Id


class Peeked(Reply, tag="peeked", kw_only=True):
    """Fields with their bytes, the status per task, and how often it was refused."""

    fields: dict[str, int]
    status: dict[str, str]
    attempts: int
    reason: str = ""


class Stats(SessionRequest, tag="stats", kw_only=True):
    """Read the queue's statistics, as JSON."""


class StatsReply(Reply, tag="stats_reply", kw_only=True):
    """A JSON document."""

    document: Document


SampleRequests = Put | Room | Get | Claim | Complete | Ack | Nack | ListSamples | Peek | Stats
SampleReplies = Stored | Rows | Claimed | AlreadyDone | Listed | Peeked | StatsReply
