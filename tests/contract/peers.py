"""What the contract suite talks through: the library's clients behind the reference client's `hello` and `call`."""

import hashlib
import itertools
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.contract import reference_client
from tests.contract.reference_client import RefusedError
from tests.support.memory_queue import MemoryQueue
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.queue_client import AlreadyDone, new_id
from xtoken_core.data_plane.run_client import RunClient, StepRows
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import StaleSessionError
from xtoken_core.wire import Column, QueueError, object_column, object_values
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import offsets_from_lengths, unit_bytes

Neutral = tuple[str, str, tuple[int, ...], list[Any]]


def ints(*rows: list[int]) -> Neutral:
    """A jagged int64 column."""
    return ("jagged", "int64", (), [b"".join(v.to_bytes(8, "little", signed=True) for v in row) for row in rows])


def column_from(neutral: Neutral) -> Column:
    """The library's form of a column."""
    kind, dtype, shape, rows = neutral
    if kind == "object":
        return object_column(rows)
    unit = unit_bytes(kind, dtype, shape)  # type: ignore[arg-type]
    offsets = None if kind == "dense" else offsets_from_lengths([len(row) // unit for row in rows])
    return Column(kind, dtype, len(rows), shape, memoryview(b"".join(rows)), offsets)  # type: ignore[arg-type]


def neutral_from(column: Column) -> Neutral:
    """The reference client's form of a column."""
    if column.kind == "object":
        return ("object", "", (), object_values(column))
    rows = [bytes(column.values[slice(*column.row_bounds(row))]) for row in range(column.rows)]
    return (column.kind, column.dtype, column.item_shape, rows)


class LibraryPeer:
    """The library's client behind the reference client's interface; `partition` has to be named in each call."""

    def __init__(self, client: TaskClient) -> None:
        self.client = client

    def hello(self, name: str, role: str, incarnation: int, **options: Any) -> dict[str, Any] | None:
        """Open a session; None if no run was open in time."""
        try:
            found = self.client.hello(name, role, incarnation=incarnation, **options)
        except (StaleSessionError, QueueError) as error:
            raise _refused(error) from error
        return {"type": "welcome", "partition": self.client.partition} if found else None

    @property
    def session(self) -> str:
        """The session's id."""
        return self.client.session

    def call(self, kind: str, columns: Mapping[str, Neutral] | None = None, **fields: Any) -> dict[str, Any] | None:
        """One of the client's methods, its result as the reply's map."""
        try:
            packed = None if columns is None else {name: column_from(column) for name, column in columns.items()}
            return _METHODS[kind](self.client, packed, fields)
        except AlreadyDone:
            return {"type": "already_done", "columns": {}}
        except (StaleSessionError, QueueError) as error:
            raise _refused(error) from error

    def close(self) -> None:
        """Let the connection go."""
        self.client.close()


def _refused(error: Exception) -> RefusedError:
    if isinstance(error, QueueError):
        return RefusedError(error.code, str(error), error.detail)
    return RefusedError("stale_session", str(error), {})


def _reply(kind: str, columns: Mapping[str, Column] | None = None, **fields: Any) -> dict[str, Any]:
    shown = {name: neutral_from(column) for name, column in (columns or {}).items()}
    return {"type": kind, **fields, "columns": shown}


def _claimed(found: tuple[m.Claimed, dict[str, Column]] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    claim, columns = found
    return _reply(
        "claimed", columns, lease=claim.lease, ids=claim.ids, dead=claim.dead, slot=claim.slot,
        generation=claim.generation, slots=[msgspec.to_builtins(ref) for ref in claim.slots],
    )  # fmt: skip


def _run(client: TaskClient, fields: dict[str, Any]) -> RunClient:
    return RunClient(client, fields.pop("partition"))


def _open(client: TaskClient, _: Any, f: dict[str, Any]) -> dict[str, Any]:
    tasks = [m.TaskDef(**task) for task in f.pop("tasks", [])]
    run = m.RunDef(**f.pop("run")) if "run" in f else None
    client.open(f.pop("partition"), tasks, run=run, **f)
    return _reply("ok")


def _put(client: TaskClient, columns: Any, f: dict[str, Any]) -> dict[str, Any]:
    if "lease" in f:
        _run(client, f).put_block(f["lease"], f["ids"], columns, f.get("tombstones", {}))
        return _reply("stored")
    return _reply("stored", room=client.put(f["partition"], f["ids"], columns))


def _clear(client: TaskClient, _: Any, f: dict[str, Any]) -> dict[str, Any]:
    client.clear(f["partition"], None if f.get("everything") else f["ids"])
    return _reply("ok")


def _get(client: TaskClient, _: Any, f: dict[str, Any]) -> dict[str, Any] | None:
    columns = client.get(f["partition"], f["ids"], f["fields"], wait_s=f.get("wait_s", 0.0))
    return None if columns is None else _reply("rows", columns, ids=f["ids"])


def _window(client: TaskClient, _: Any, f: dict[str, Any]) -> dict[str, Any] | None:
    rows: StepRows | None = _run(client, f).window(**f)
    if rows is None:
        return None
    return _reply("window_rows", rows.columns, ids=rows.ids, skipped=rows.skipped, dead=rows.dead)


def _looked(client: TaskClient, f: dict[str, Any]) -> dict[str, Any]:
    seen = client.peek(f["partition"], f["sample"])
    return _reply("peeked", fields=seen.fields, status=seen.status, attempts=seen.attempts, reason=seen.reason)


def _listed(client: TaskClient, f: dict[str, Any]) -> dict[str, Any]:
    found = client.list_samples(f.pop("partition"), f.pop("state"), **f)
    return _reply("listed", ids=found.ids, reasons=found.reasons)


def _ok(_: object) -> dict[str, Any]:
    return _reply("ok")


def _room(client: TaskClient, f: dict[str, Any]) -> dict[str, Any] | None:
    room = client.room(f["partition"], f["bytes"], wait_s=f.get("wait_s", 0.0))
    return None if room is None else _reply("stored", room=room)


def _plain(kind: str, reply: m.Reply | None, *names: str) -> dict[str, Any] | None:
    return None if reply is None else _reply(kind, **{name: getattr(reply, name) for name in names})


def _claim_run(client: TaskClient, f: dict[str, Any], method: str) -> dict[str, Any] | None:
    run = _run(client, f)
    arguments = {"fields": [], "wait_s": 0.0, **f}
    return _claimed(run.claim_slot(**arguments) if method == "slot" else run.claim_batch(**arguments))


_METHODS: dict[str, Any] = {
    "heartbeat": lambda c, _, f: _ok(c.heartbeat(f["phase"], f.get("progress", 0))),
    "bye": lambda c, _, f: _ok(c.bye()),
    "open": _open,
    "seal": lambda c, _, f: _ok(c.seal(f["partition"])),
    "clear": _clear,
    "put": _put,
    "room": lambda c, _, f: _room(c, f),
    "get": _get,
    "claim": lambda c, _, f: _claimed(c.claim(f.pop("partition"), f.pop("task"), **f)),
    "complete": lambda c, columns, f: _ok(c.complete(f["partition"], f["lease"], columns)),
    "ack": lambda c, _, f: _ok(c.ack(f["partition"], f["task"], f["ids"])),
    "nack": lambda c, _, f: _ok(c.nack(f["partition"], f["lease"], f["ids"], f["reason"])),
    "list": lambda c, _, f: _listed(c, f),
    "peek": lambda c, _, f: _looked(c, f),
    "stats": lambda c, _, f: _reply("stats_reply", document=c.ask(m.Stats(id=new_id(), session=c.session),
                                                                  m.StatsReply)[0].document),
    "lease_block": lambda c, _, f: _plain("block", _run(c, f).lease_block(wait_s=f.get("wait_s", 0.0)),
                                          "lease", "first", "count"),
    "window": lambda c, _, f: _window(c, _, {"wait_s": 0.0, **f}),
    "await_trainer": lambda c, _, f: _plain("trainer", _run(c, f).await_trainer(f["rank"], wait_s=f.get("wait_s", 0.0)),
                                            "trainer", "step", "rewinds"),
    "announce_ring": lambda c, _, f: _reply("ring", ring=_run(c, f).announce_ring(**f)),
    "await_ring": lambda c, _, f: _plain("ring", _run(c, f).await_ring(f["teacher"], wait_s=f.get("wait_s", 0.0)),
                                         "ring", "handle"),
    "opened_ring": lambda c, _, f: _ok(_run(c, f).confirm_ring(**f)),
    "await_opened": lambda c, _, f: (
        _reply("ok") if _run(c, f).await_opened(f["ring"], wait_s=f.get("wait_s", 0.0)) else None
    ),
    "claim_slot": lambda c, _, f: _claim_run(c, f, "slot"),
    "claim_batch": lambda c, _, f: _claim_run(c, f, "batch"),
    "release": lambda c, _, f: _ok(_run(c, f).release(**f)),
    "check_step": lambda c, _, f: _reply("verdict", redo=_run(c, f).check_step(f["step"], f.get("dead", []),
                                                                               rewinds=f["rewinds"])),
    "ack_window": lambda c, _, f: _ok(_run(c, f).ack_window(**f)),
    "rewind": lambda c, _, f: _reply("rewound", rewinds=_run(c, f).rewind(f["step"], f.get("skipped", {}),
                                                                          f.get("dead", {}))),
    "give_up": lambda c, _, f: _ok(_run(c, f).give_up(**f)),
}  # fmt: skip


class Forgetful:
    """Makes a transport lose replies: the request has been answered, and its sender never hears of it."""

    def __init__(self, peer: Any) -> None:
        self.losses = 0
        self.peer = peer
        if isinstance(peer, reference_client.Client):
            peer.receive = self._losing(peer.receive)  # type: ignore[method-assign]
        elif isinstance(transport := peer.client.transport, ZmqTransport):
            transport._connection = self._on_each_connection(transport._connection)  # type: ignore[method-assign]
        else:
            transport.exchange = self._asking_twice(transport.exchange)

    def _losing(self, receive: Any) -> Any:
        def lossy(*arguments: Any) -> Any:
            answer = receive(*arguments)
            if self.losses and answer is not None:
                self.losses -= 1
                return None
            return answer

        return lossy

    def _on_each_connection(self, connect: Any) -> Any:
        wrapped: set[Any] = set()

        def lossy() -> Any:
            connection = connect()
            if connection not in wrapped:
                wrapped.add(connection)
                connection.receive = self._losing(connection.receive)
            return connection

        return lossy

    def _asking_twice(self, exchange: Any) -> Any:
        def lossy(*arguments: Any) -> Any:
            while self.losses:
                self.losses -= 1
                exchange(*arguments)
            return exchange(*arguments)

        return lossy


def public_id(session: str) -> str:
    """What names a session to other workers and in the statistics."""
    return hashlib.blake2s(session.encode(), digest_size=8).hexdigest()


class Place:
    """A queue that peers of one kind connect to."""

    def __init__(self, kind: str, memory: MemoryQueue | None = None, address: Address | None = None) -> None:
        self.kind = kind
        self.memory = memory
        self.address = address
        self._names = itertools.count()
        self._peers: list[Any] = []

    def connect(self) -> Any:
        """A peer without a session."""
        if self.memory is not None:
            peer: Any = LibraryPeer(self.memory.connect())
        elif self.kind == "library":
            assert self.address is not None
            peer = LibraryPeer(TaskClient(ZmqTransport(self.address)))
        else:
            token = self.address.token_file
            peer = reference_client.Client(self.address.url, token.read_text().strip() if token else None)
        self._peers.append(peer)
        return peer

    def worker(self, role: str = "worker", *, name: str = "", incarnation: int = 1, **options: Any) -> Any:
        """A peer with a session."""
        peer = self.connect()
        peer.hello(name or self.name("w"), role, incarnation, **options)
        return peer

    def name(self, what: str) -> str:
        """A name that no other test uses."""
        return f"{what}-{next(self._names)}-{time.time_ns()}"

    def leave(self) -> None:
        """End the sessions that are still open, and the connections."""
        for peer in self._peers:
            try:
                if peer.session:
                    peer.call("bye")
            except RefusedError:
                pass
            peer.close()
        self._peers.clear()


def code_of(peer: Any, kind: str, **fields: Any) -> str:
    """The code of the error that a request is answered with."""
    with pytest.raises(RefusedError) as refused:
        peer.call(kind, **fields)
    return str(refused.value.code)
