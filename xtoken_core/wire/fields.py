"""The types of messages' fields: bounded values, and structures of several.

Names that other modules use stand in `messages` too.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from xtoken_core.wire.bounds import MAX_COLUMNS, MAX_DOCUMENT_BYTES, MAX_IDS, MAX_ROWS, MAX_TEXT, MAX_TOKEN, MAX_WAIT_S
from xtoken_core.wire.columns import ColumnHead, Id, Name

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN)]
SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN)]
Ids = Annotated[list[Id], msgspec.Meta(max_length=MAX_IDS)]
"""Ids in a request."""
ManyIds = Annotated[list[Id], msgspec.Meta(max_length=MAX_ROWS)]
"""Ids in a reply."""
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_COLUMNS)]
Heads = Annotated[list[ColumnHead], msgspec.Meta(max_length=MAX_COLUMNS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Reasons = Annotated[dict[Id, Text], msgspec.Meta(max_length=MAX_ROWS)]
Document = Annotated[bytes, msgspec.Meta(max_length=MAX_DOCUMENT_BYTES)]
Handle = Annotated[bytes, msgspec.Meta(max_length=MAX_TEXT)]


class TaskDef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A consumer of samples: it sees a sample once all `requires` are produced."""

    name: Name
    requires: Names
    order: Literal["strict", "arrival", "by_id"] = "strict"


class RunDef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Definition of a run: positions `0 .. positions - 1` in steps of `samples_per_step`.

    With several node groups the queue serves one of them, with that group's part of every step. The last `prompts`
    positions of a step are completed by rollout workers, with weights at most `max_staleness` steps old. The first
    `after` steps have none, and with `last_prompts` the number goes in a straight line to that of the last step.
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
    last_prompts: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROWS)] | None = None
    after: Id = 0
    max_staleness: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    document: Document


class SlotRef(msgspec.Struct, kw_only=True):
    """Slot that holds a teacher's signal for a claimed micro-batch: its row `i` belongs to sample `ids[i]`."""

    teacher: Index
    ring: Id
    slot: Index
    generation: Id
