"""Messages that define a partition, seal it and clear it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from xtoken_core.wire.bounds import MAX_IDS, MAX_ROWS
from xtoken_core.wire.columns import Id, Name
from xtoken_core.wire.messages.base import Document, Ids, Names, PartitionRequest


class TaskDef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A consumer of samples: it sees a sample once all `requires` are produced."""

    name: Name
    requires: Names
    order: Literal["strict", "arrival", "by_id"] = "strict"


class RunDef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Definition of a run: positions `0 .. positions - 1` in steps of `samples_per_step`.

    With several node groups the queue serves one of them, with that group's part of every step. The last `prompts`
    positions of a step are completed by rollout workers, with weights at most `max_staleness` steps old.
    """

    positions: Id
    samples_per_step: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_IDS)]
    span: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    teachers: Annotated[int, msgspec.Meta(ge=0, le=64)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    max_dead: Id = 0
    group: Annotated[int, msgspec.Meta(ge=0, le=4095)] = 0
    groups: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    prompts: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROWS)] = 0
    max_staleness: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    document: Document


class OpenPartition(PartitionRequest, tag="open", kw_only=True):
    """Create a partition; the same one again is no error."""

    tasks: Annotated[list[TaskDef], msgspec.Meta(max_length=64)]
    volatile: Names = []
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 3
    run: RunDef | None = None


class Seal(PartitionRequest, tag="seal", kw_only=True):
    """Close the partition to further puts."""


class Clear(PartitionRequest, tag="clear", kw_only=True):
    """Forget these samples, or with `everything` the whole partition."""

    ids: Ids = []
    everything: bool = False


PartitionRequests = OpenPartition | Seal | Clear
