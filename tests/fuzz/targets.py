"""Fuzz targets: functions of bytes that return for any input, or raise what the parser under test must not raise."""

import os
import sqlite3
import struct
import tempfile
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from xtoken_core.config.spec import parse_run_spec
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.model_files import INDEX, SUFFIX, weight_files
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.response import Response
from xtoken_core.queue.run.names import COLLATOR, TEACHER, TRAINER
from xtoken_core.wire import QueueError, gather_rows, object_values, pack_columns, select_rows, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import ColumnHead
from xtoken_services.control.isolated.toml_text import check_document
from xtoken_services.queue import log_records as records
from xtoken_services.queue.journal_file import JournalFile, log_of, read
from xtoken_services.queue.replay import apply

LENGTH = struct.Struct("<H")
SNAPSHOT = 40
"""Records that a journal to damage begins with."""
MEMORY = 1 << 20
RUN = m.RunDef(positions=64, samples_per_step=4, block_size=4, span=16, teachers=1, ranks=1, slots=2, document=b"{}")
ROLES: dict[type[m.Request], str] = {
    m.LeaseBlock: COLLATOR, m.AwaitTrainer: TEACHER, m.AnnounceRing: TEACHER, m.AwaitOpened: TEACHER,
    m.ClaimSlot: TEACHER, m.Complete: TEACHER,
}  # fmt: skip
HEADS = msgspec.msgpack.Decoder(list[ColumnHead])
HOME = tempfile.TemporaryDirectory(prefix="xf-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
"""Removed at the end of this process, unless that is by `os._exit`."""
SCRATCH = Path(HOME.name)


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
        self.engine = Engine(memory_limit=MEMORY, clock=lambda: 0.0, opens=any_partition)
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
    """Replay records, each a piece of pieces: its head and its buffers; or, after a zero, read a damaged journal."""
    if data[:1] == b"\0":
        damaged_journal(pieces(data[1:]))
        return
    queue = Engine(memory_limit=MEMORY, clock=lambda: 0.0, opens=any_partition)
    try:
        apply(queue, [(head, buffers) for head, *buffers in (pieces(one) or [b""] for one in pieces(data[1:]))])
    except ValueError:
        return
    queue.tick()
    again = [(msgspec.msgpack.encode(head), buffers) for head, buffers in records.snapshot(queue)]
    apply(Engine(memory_limit=MEMORY, clock=lambda: 0.0, opens=any_partition), again)


@cache
def killed_journal() -> tuple[bytes, bytes, list[tuple[bytes, list[bytes]]]]:
    """Return a journal as a killed queue leaves it: its database, the database's log, and the records in them."""
    path = SCRATCH / "killed.journal"
    entries = [(records.Sealed(partition=f"p{number}"), [bytes(50 * number)]) for number in range(80)]
    file = JournalFile(path, entries[:SNAPSHOT], "OFF")
    for number in range(SNAPSHOT, len(entries)):
        file.append(*entries[number])
        if number % 2:
            file.commit()
    found = path.read_bytes(), log_of(path).read_bytes()
    file.close()
    return *found, [(msgspec.msgpack.encode(head), buffers) for head, buffers in entries]


def damaged_journal(changes: list[bytes]) -> None:
    """Read a journal with changed bytes, each where its first four say; it is refused, or loses what came last only."""
    whole, rest, entries = killed_journal()
    database, log = bytearray(whole), bytearray(rest)
    for change in changes:
        at = int.from_bytes(change[:4], "little") % (len(database) + len(log))
        file, at = (database, at) if at < len(database) else (log, at - len(database))
        file[at : at + len(change) - 4] = change[4:][: len(file) - at]
    path = SCRATCH / "00000001.journal"
    path.write_bytes(database)
    log_of(path).write_bytes(log)
    try:
        found = list(read(path))
    except (ValueError, sqlite3.Error):
        return
    assert found == entries[: len(found)]
    assert len(found) >= SNAPSHOT


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
