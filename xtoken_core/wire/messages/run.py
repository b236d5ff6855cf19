"""Messages of a run's pipeline: blocks, windows, rings, slots and steps."""

from __future__ import annotations

from xtoken_core.wire.columns import Id
from xtoken_core.wire.messages.base import (
    Handle,
    Heads,
    Ids,
    Index,
    ManyIds,
    Names,
    PartitionRequest,
    Reasons,
    Reply,
    Seconds,
    SessionId,
    Text,
)


class LeaseBlock(PartitionRequest, tag="lease_block", kw_only=True):
    """Lease the lowest free block of positions less than `span` above the lowest one not done.

    A collator gets blocks of text, a rollout worker blocks of prompts of steps that may train on the published weights.
    """

    wait_s: Seconds = 0.0


class Block(Reply, tag="block", kw_only=True):
    """Positions `first .. first + count - 1`; for prompts the oldest weights that may complete them and their tag."""

    lease: Id
    first: Id
    count: Id
    version: Id = 0
    tag: Id = 0


class Window(PartitionRequest, tag="window", kw_only=True):
    """Read columns of a step's rows once every position of it has its row or tombstone."""

    step: Id
    rewinds: Id
    fields: Names
    wait_s: Seconds = 0.0


class WindowRows(Reply, tag="window_rows", kw_only=True):
    """Positions with a row (dead ones included), those without, and their columns."""

    ids: ManyIds
    skipped: ManyIds = []
    dead: ManyIds = []
    columns: Heads = []


class AwaitTrainer(PartitionRequest, tag="await_trainer", kw_only=True):
    """Wait until a trainer's session of this rank has joined the latest rewind."""

    rank: Index
    wait_s: Seconds = 0.0


class Trainer(Reply, tag="trainer", kw_only=True):
    """The public id of the trainer's session, the step it is at and the count of rewinds so far."""

    trainer: SessionId
    step: Id
    rewinds: Id


class AnnounceRing(PartitionRequest, tag="announce_ring", kw_only=True):
    """A teacher offers its ring of slots to one trainer session, named by its public id."""

    teacher: Index
    rank: Index
    trainer: SessionId
    handle: Handle


class AwaitRing(PartitionRequest, tag="await_ring", kw_only=True):
    """A trainer waits for the ring of one of its teachers."""

    teacher: Index
    wait_s: Seconds = 0.0


class Ring(Reply, tag="ring", kw_only=True):
    """A ring's number and, for its trainer, the handle that the teacher announced."""

    ring: Id
    handle: Handle = b""


class OpenedRing(PartitionRequest, tag="opened_ring", kw_only=True):
    """The trainer has opened the ring and read its canary: slots may be claimed."""

    teacher: Index
    ring: Id


class AwaitOpened(PartitionRequest, tag="await_opened", kw_only=True):
    """The teacher waits until its ring was opened."""

    ring: Id
    wait_s: Seconds = 0.0


class ClaimSlot(PartitionRequest, tag="claim_slot", kw_only=True):
    """A teacher leases its next micro-batch together with a free slot of its ring."""

    ring: Id
    rewinds: Id
    ids: Ids
    fields: Names = []
    wait_s: Seconds = 0.0


class ClaimBatch(PartitionRequest, tag="claim_batch", kw_only=True):
    """A trainer leases a micro-batch once every teacher's signal is there."""

    rewinds: Id
    ids: Ids
    fields: Names = []
    wait_s: Seconds = 0.0


class Release(PartitionRequest, tag="release", kw_only=True):
    """The backward that read the slot has completed."""

    ring: Id
    slot: Index
    generation: Id


class CheckStep(PartitionRequest, tag="check_step", kw_only=True):
    """Ask for the verdict on a step; `dead` are the dead positions that its denominators leave out."""

    step: Id
    rewinds: Id
    dead: ManyIds = []


class Verdict(Reply, tag="verdict", kw_only=True):
    """`redo`: a signal was withdrawn while it was read, or a position died."""

    redo: bool


class AckWindow(PartitionRequest, tag="ack_window", kw_only=True):
    """The optimiser has taken the step: its window is done and its memory is free."""

    step: Id
    rewinds: Id


class Rewind(PartitionRequest, tag="rewind", kw_only=True):
    """Start (again) at a step: the only recovery path. `skipped` and `dead` below it are known to the trainer."""

    step: Id
    skipped: Reasons = {}
    dead: Reasons = {}


class Rewound(Reply, tag="rewound", kw_only=True):
    """Number of rewinds so far, which requests of the run name."""

    rewinds: Id


class Publish(PartitionRequest, tag="publish", kw_only=True):
    """The trainer has published its weights of the current step; they carry a tag that is new at every rewind."""

    step: Id
    rewinds: Id
    tag: Id


class Giveup(PartitionRequest, tag="give_up", kw_only=True):
    """End the run for all workers, with a reason such as too many dead letters."""

    reason: Text


RunRequests = (
    LeaseBlock
    | Window
    | AwaitTrainer
    | AnnounceRing
    | AwaitRing
    | OpenedRing
    | AwaitOpened
    | ClaimSlot
    | ClaimBatch
    | Release
    | CheckStep
    | AckWindow
    | Rewind
    | Publish
    | Giveup
)
RunReplies = Block | WindowRows | Trainer | Ring | Verdict | Rewound
