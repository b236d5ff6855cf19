"""Fuzz targets: functions of bytes that return for any input, or raise what the parser under test must not raise."""

from __future__ import annotations

import os
import struct
import tempfile
import tomllib
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from xtoken_core.config.spec import parse_run_spec
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.model_files import INDEX, SUFFIX, weight_files
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.response import Response
from xtoken_core.queue.run.names import COLLATOR, TEACHER, TRAINER
from xtoken_core.wire import QueueError, gather_rows, object_values, pack_columns, select_rows, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import ColumnHead
from xtoken_services.control.isolated.toml_text import check_document
from xtoken_services.queue import log_records as records
from xtoken_services.queue.replay import apply
from xtoken_services.queue.segment import CHECK, HEADER, PREFIX, Reader

LENGTH = struct.Struct("<H")
MEMORY = 1 << 20
RUN = m.RunDef(positions=64, samples_per_step=4, block_size=4, span=16, teachers=1, ranks=1, slots=2, document=b"{}")
ROLES: dict[type[m.Request], str] = {
    m.LeaseBlock: COLLATOR, m.AwaitTrainer: TEACHER, m.AnnounceRing: TEACHER, m.AwaitOpened: TEACHER,
    m.ClaimSlot: TEACHER, m.Complete: TEACHER,
}  # fmt: skip
HEADS = msgspec.msgpack.Decoder(list[ColumnHead])
SCRATCH = Path(tempfile.mkdtemp(prefix="xf-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def pieces(data: bytes) -> list[bytes]:
    """Cut data into pieces that each follow their length (`<H`); the last may be shorter."""
    out, at = [], 0
    while at + LENGTH.size <= len(data):
        stop = at + LENGTH.size + LENGTH.unpack_from(data, at)[0]
        out.append(data[at + LENGTH.size : stop])
        at = stop
    return out


def joined(parts: list[bytes]) -> bytes:
    """Return data that `pieces` cuts into these parts, the inverse for seeds."""
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


class Peers:
    """An engine with a partition `plain` and a run `a_run`, and the sessions of three workers of the run."""

    def __init__(self) -> None:
        self.engine = Engine(memory_limit=MEMORY, clock=lambda: 0.0)
        self.sessions = {role: self._hello(role) for role in (COLLATOR, TEACHER, TRAINER)}
        self.trainer = self.engine.sessions.get(self.sessions[TRAINER]).public_id
        tasks = [m.TaskDef(name="train", requires=["input_ids"])]
        self.engine.handle(m.OpenPartition(id="a", **self._at("plain"), tasks=tasks), ())
        self.engine.handle(m.OpenPartition(id="b", **self._at("a_run"), tasks=[], run=RUN), ())

    def _hello(self, role: str) -> str:
        welcome = self.engine.handle(m.Hello(id="h", versions=[2], name=role, role=role, incarnation=1), ())
        assert welcome is not None and isinstance(welcome.reply, m.Welcome)
        return welcome.reply.session

    def _at(self, partition: str) -> dict[str, str]:
        return {"session": self.sessions[TRAINER], "partition": partition}

    def handle(self, request: m.AnyRequest, buffers: list[bytes]) -> Response | None:
        """Answer a request in a session of the worker that sends requests of its type."""
        if isinstance(request, m.SessionRequest):
            request.session = self.sessions[ROLES.get(type(request), TRAINER)]
        if isinstance(request, m.AnnounceRing):
            request.trainer = self.trainer
        if isinstance(request, (m.Put, m.Nack)) and request.partition == "a_run":
            request.session = self.sessions[COLLATOR]
        return self.engine.handle(request, buffers)


def frames(data: bytes) -> None:
    """Parse messages and give them to an engine; an empty piece ends a message."""
    peers = Peers()
    message: list[bytes] = []
    for piece in [*pieces(data)[:64], b""]:
        if piece:
            message.append(piece)
            continue
        header, buffers = message[0] if message else b"", message[1:]
        message = []
        m.envelope(header)
        for decode in (m.decode_reply, m.decode_request):
            try:
                decoded = decode(header)
            except QueueError:
                continue
            again = m.encode(decoded)
            assert m.encode(decode(again)) == again
        try:
            response = peers.handle(m.decode_request(header), buffers)
            if response is not None:
                response.frames()
                m.decode_reply(m.encode(response.reply))
        except QueueError:
            pass
        peers.engine.tick()


def columns(data: bytes) -> None:
    """Validate columns: a piece with their heads, then their buffers."""
    head, *buffers = pieces(data) or [b""]
    try:
        found = unpack_columns(HEADS.decode(head), buffers)
    except (msgspec.MsgspecError, UnicodeDecodeError, QueueError):
        return
    heads, packed = pack_columns(found)
    assert unpack_columns(heads, packed) == found
    for column in found.values():
        rows = range(column.rows)
        if column.rows > 1 << 12:
            continue
        assert select_rows(column, rows) == column
        backwards = gather_rows([(column, [row]) for row in reversed(rows)]) if rows else column
        assert backwards.values.nbytes == column.values.nbytes
        if column.kind == "object":
            with suppress(QueueError):
                object_values(column)


def journal(data: bytes) -> None:
    """Replay a segment: the bytes of one, or pieces as the bodies of records with correct numbers and checksums."""
    segment = data[1:]
    if data[:1] != b"\0":
        segment = sealed(pieces(segment))
    path = SCRATCH / "00000001.journal"
    path.write_bytes(segment)
    queue = Engine(memory_limit=MEMORY, clock=lambda: 0.0)
    try:
        apply(queue, Reader(path))
    except InputError as error:
        assert "\n" not in str(error)
        return
    queue.tick()
    bodies = [body_of(head, buffers) for head, buffers in records.snapshot(queue)]
    path.write_bytes(sealed(bodies))
    apply(Engine(memory_limit=MEMORY, clock=lambda: 0.0), Reader(path))


def sealed(bodies: list[bytes]) -> bytes:
    """Return a segment with these bodies."""
    out, chain = [HEADER], 0
    for number, body in enumerate(bodies, 1):
        prefix = PREFIX.pack(number, len(body))
        check = zlib.crc32(prefix, chain)
        chain = zlib.crc32(body, check)
        out += [prefix, CHECK.pack(check), body, CHECK.pack(chain)]
    return b"".join(out)


def body_of(head: records.Record, buffers: records.Sequence[records.Buffer]) -> bytes:
    """Return the body of a record."""
    header = msgspec.msgpack.encode(head)
    return b"".join([CHECK.pack(len(header)), header, *buffers])


def index(data: bytes) -> None:
    """Read the index of a model's weights; every file that it leads to lies beside it."""
    (SCRATCH / INDEX).write_bytes(data)
    try:
        files = weight_files(SCRATCH)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert all(file.parent == SCRATCH and file.name.endswith(SUFFIX) and "/" not in file.name for file in files)


def run_file(data: bytes) -> None:
    """Parse a run file, within the bounds of one that comes over HTTP."""
    try:
        document = tomllib.loads(data.decode("utf-8"))
        check_document(document)
    except (ValueError, RecursionError):
        return
    try:
        spec = parse_run_spec(document, source="run.toml")
        spec.with_base(SCRATCH)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert parse_run_spec(spec.model_dump(mode="python"), source="again") == spec


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": frames, "columns": columns, "journal": journal, "index": index, "run_file": run_file,
}  # fmt: skip
