"""The messages between the queue and its clients, by what they are about, with their encoding.

Bounds of fields are part of a message: what exceeds one is refused before anything reads it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from xtoken_core.wire.bounds import MAX_HEADER_BYTES, MAX_IDS, MAX_NAME, MAX_SILENCE_S
from xtoken_core.wire.columns import Id, Name
from xtoken_core.wire.errors import QueueError
from xtoken_core.wire.fields import (
    Document,
    Handle,
    Heads,
    Ids,
    Index,
    ManyIds,
    Names,
    Reasons,
    RequestId,
    Seconds,
    SessionId,
    Text,
)
from xtoken_core.wire.fields import RunDef as RunDef
from xtoken_core.wire.fields import SlotRef as SlotRef
from xtoken_core.wire.fields import TaskDef as TaskDef

VERSION = 2
"""The version that the queue speaks, described in `proto/README.md`."""


class Request(msgspec.Struct, tag_field="type", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields of every request."""

    id: RequestId


class SessionRequest(Request, kw_only=True):
    """A request inside a session."""

    session: SessionId


class PartitionRequest(SessionRequest, kw_only=True):
    """A request about one partition."""

    partition: Name


class Reply(msgspec.Struct, tag_field="type", kw_only=True, omit_defaults=True):
    """Fields of every reply."""

    id: RequestId = ""


# Sessions, and replies without content.
class Hello(Request, tag="hello", kw_only=True):
    """Open a session. It waits up to `wait_s` for a run to be open, if `needs_run`."""

    versions: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]
    name: Name
    role: Name
    incarnation: Id
    rank: Index = 0
    silence_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SILENCE_S)] = 30.0
    needs_run: bool = False
    wait_s: Seconds = 0.0


class Welcome(Reply, tag="welcome", kw_only=True):
    """The session and the queue's memory limit; with a run open, its partition and resolved specification (JSON)."""

    session: SessionId
    version: int
    partition: str = ""
    run: Document = b""
    memory_limit: Annotated[int, msgspec.Meta(ge=0)] = 0


class Heartbeat(SessionRequest, tag="heartbeat", kw_only=True):
    """Keep a session alive; `progress` counts units of finished work, `activity` describes work that takes long."""

    phase: Name
    progress: Id = 0
    activity: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class Bye(SessionRequest, tag="bye", kw_only=True):
    """End the session."""


class Ok(Reply, tag="ok", kw_only=True):
    """Done."""


class Empty(Reply, tag="empty", kw_only=True):
    """The wait ended and there was nothing: ask again."""


class Failure(Reply, tag="error", kw_only=True):
    """Refused; `code` is one of `xtoken_core.wire.errors.CODES`."""

    code: Name
    message: Text
    detail: dict[str, int] = {}


# Partitions.
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


# Samples: put, read, claim and finish them.
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


# A run's pipeline: blocks, windows, rings, slots and steps.
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


_SessionRequests = Hello | Heartbeat | Bye
_PartitionRequests = OpenPartition | Seal | Clear
_SampleRequests = Put | Room | Get | Claim | Complete | Ack | Nack | ListSamples | Peek | Stats
_RingRequests = LeaseBlock | Window | AwaitTrainer | AnnounceRing | AwaitRing | OpenedRing | AwaitOpened
_StepRequests = ClaimSlot | ClaimBatch | Release | CheckStep | AckWindow | Rewind | Publish | Giveup
_SampleReplies = Stored | Rows | Claimed | AlreadyDone | Listed | Peeked | StatsReply
AnyRequest = _SessionRequests | _PartitionRequests | _SampleRequests | _RingRequests | _StepRequests
AnyReply = Welcome | Ok | Empty | Failure | _SampleReplies | Block | WindowRows | Trainer | Ring | Verdict | Rewound

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


class _Envelope(msgspec.Struct):
    """Part of a request that is read even if the rest is refused."""

    type: str = ""
    id: str = ""


_envelopes = msgspec.msgpack.Decoder(_Envelope)
TAGS: dict[type[Request], str] = {kind: str(kind.__struct_config__.tag) for kind in AnyRequest.__args__}
"""Name of every type of request."""
REQUEST_TYPES = frozenset(TAGS.values())


def encode(message: Request | Reply) -> bytes:
    """Encode the header frame of a message."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> AnyRequest:
    """Decode a request from its header frame.

    Raises:
        QueueError: `bad_frame`, `unknown_message`, `bad_request` or `too_large`, naming the misfit.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise QueueError("too_large", f"a header has {len(frame)} bytes; {MAX_HEADER_BYTES} are allowed")
    try:
        return _requests.decode(frame)
    except msgspec.ValidationError as error:
        kind = envelope(frame).type
        if kind and kind not in REQUEST_TYPES:
            raise QueueError("unknown_message", f"unknown message {kind[:64]!r} (version {VERSION})") from error
        raise QueueError("bad_request", f"{kind[:64] or 'message'}: {error}"[:1000]) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise QueueError("bad_frame", f"the header is no msgpack message: {error}"[:1000]) from error


def decode_reply(frame: bytes | memoryview) -> AnyReply:
    """Decode a reply from its header frame.

    Raises:
        QueueError: `bad_frame` if the frame is no reply.
    """
    try:
        return _replies.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise QueueError("bad_frame", f"the peer's reply is no message of version {VERSION}: {error}") from error


def envelope(frame: bytes | memoryview) -> _Envelope:
    """Return type and id of a message, empty where they cannot be read."""
    try:
        head = _envelopes.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _Envelope()
    return _Envelope(head.type[:64], head.id[:64])
