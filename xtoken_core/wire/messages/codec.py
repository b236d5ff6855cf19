"""Encoding and decoding of messages."""

from __future__ import annotations

import msgspec

from xtoken_core.wire.bounds import MAX_HEADER_BYTES
from xtoken_core.wire.errors import QueueError
from xtoken_core.wire.messages.base import Reply, Request
from xtoken_core.wire.messages.partitions import PartitionRequests
from xtoken_core.wire.messages.run import RunReplies, RunRequests
from xtoken_core.wire.messages.samples import SampleReplies, SampleRequests
from xtoken_core.wire.messages.sessions import SessionReplies, SessionRequests

VERSION = 2
"""The version that the queue speaks, described in `proto/README.md`."""

AnyRequest = SessionRequests | PartitionRequests | SampleRequests | RunRequests
AnyReply = SessionReplies | SampleReplies | RunReplies

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
