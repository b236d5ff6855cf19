"""Drives queues by the same commands as the oracle: names of sessions and leases are translated, answers compared."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tests.contract.oracle import Answer
from tests.contract.peers import column_from, neutral_from
from tests.contract.processes import ipc_address
from tests.support.memory_queue import MemoryQueue
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import QueueUnreachableError
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_core.wire import messages as m
from xtoken_core.wire import pack_columns, unpack_columns
from xtoken_services.queue.server import Server
from xtoken_services.queue.write_ahead_log import WriteAheadLog

PATIENCE_S = 20.0
TICK_S = 0.004


def _kinds(base: type[m.Request]) -> Iterator[tuple[str, type[m.Request]]]:
    for kind in base.__subclasses__():
        yield str(kind.__struct_config__.tag), kind
        yield from _kinds(kind)


KINDS = dict(_kinds(m.Request))


class Clock:
    """Time as the machine says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Driven:
    """A queue, one client a worker, and what its sessions and leases are called in the oracle."""

    engine: Engine

    def __init__(self, limit: int, kept: Path | None) -> None:
        self.limit, self.kept, self.clock = limit, kept, Clock()
        self.journal: WriteAheadLog | None = None
        self.clients: dict[str, TaskClient] = {}
        self.sessions: dict[str, str] = {}
        self.leases: dict[tuple[str, int], int] = {}
        self.counted: dict[str, dict[str, int]] = {}
        self.watcher = ""
        self.handled = 0

    def begin(self) -> Engine:
        """An engine, with what its journal says."""
        self.engine = engine = Engine(memory_limit=self.limit, clock=self.clock, opens=any_partition)
        if self.kept is not None:
            self.journal = WriteAheadLog(self.kept, engine)
        self.counted = {
            name: {"rows_put": part.rows_put, "given_back": part.samples.given_back}
            for name, part in engine.partitions.items()
        }
        handle = engine.handle

        def counting(*arguments: Any, **options: Any) -> Any:
            try:
                return handle(*arguments, **options)
            finally:
                self.handled += 1

        engine.handle = counting  # type: ignore[method-assign]
        return engine

    def restart(self) -> None:
        """The queue has died and is started again; clients find out when they ask."""
        self.leases.clear()
        self.leave("watch")
        self.watcher = ""

    def connect(self) -> TaskClient:
        """A new client."""
        raise NotImplementedError

    def lose_reply(self, client: TaskClient, request: m.Request, buffers: list[Any]) -> None:
        """Send a request whose answer nobody reads."""
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        """Time passes, and the queue has noticed."""
        raise NotImplementedError

    def client(self, worker: str) -> TaskClient:
        """The worker's."""
        if worker not in self.clients:
            self.clients[worker] = self.connect()
        return self.clients[worker]

    def leave(self, worker: str) -> None:
        """The worker's connection is gone, and nobody said bye."""
        if worker in self.clients:
            self.clients.pop(worker).close()

    def ask(self, worker: str, session: str, request: str, kind: str, f: Answer, *, lose: bool = False) -> Answer:
        """Send a request, and again after a lost reply; the answer in the oracle's terms, names not yet translated."""
        message, buffers = self._message(session, request, kind, f)
        client = self.client(worker)
        if lose:
            self.lose_reply(client, message, buffers)
        reply, frames = client.transport.exchange(message, buffers, f.get("wait_s", 0.0))
        return _answer(reply, frames)

    def wait(self, session: str, request: str, kind: str, f: Answer) -> Waiter:
        """Send a request that has to wait."""
        before, client = self.handled, self.connect()
        waiter = Waiter(client, *self._message(session, request, kind, f), f["wait_s"])
        deadline = time.monotonic() + PATIENCE_S
        while self.handled == before:
            assert time.monotonic() < deadline, "a waiting request was not heard"
            time.sleep(0.0005)
        return waiter

    def agree(self, partition: str, expected: Answer, found: Answer) -> None:
        """An answer must be the oracle's, whatever sessions and leases are called here."""
        if "codes" in expected:
            assert found["type"] == "error", f"{found} where one of {expected['codes']} was due"
            assert found["code"] in expected["codes"], f"{found} where one of {expected['codes']} was due"
            if found["code"] == "no_room":
                assert found["detail"] == expected["detail"]
            return
        expected, found = dict(expected), dict(found)
        if expected["type"] == found["type"] == "trainer":
            expected["trainer"] = self._public_id(expected["trainer"])
        if expected["type"] == found["type"] and expected["type"] in ("claimed", "block"):
            number, lease = expected.pop("lease"), found.pop("lease")
            known = self.leases.setdefault((partition, number), lease) if number else 0
            assert known == lease, f"lease {lease} where {known} was due"
            here = [theirs for (at, _), theirs in self.leases.items() if at == partition]
            assert len(set(here)) == len(here), f"lease {lease} was given twice"
        if expected["type"] == found["type"] == "welcome":
            known_session = self.sessions.setdefault(expected.pop("session"), found["session"])
            assert known_session == found.pop("session"), "another session where the same was due"
        assert found == expected, f"{found} where {expected} was due"

    def stats(self) -> Answer:
        """The statistics, as far as the oracle knows them."""
        if not self.watcher:
            hello = m.Hello(id="watch", versions=[2], name="watch", role="watch", incarnation=0, silence_s=86400.0)
            welcome, _ = self.client("watch").transport.exchange(hello, [], 0.0)
            assert isinstance(welcome, m.Welcome)
            self.watcher = welcome.session
        shown, _ = self.client("watch").transport.exchange(m.Stats(id="look", session=self.watcher), [], 0.0)
        assert isinstance(shown, m.StatsReply)
        document = json.loads(shown.document)
        keys = ("samples", "bytes", "leases", "oldest_lease_s", "rows_put", "given_back", "dead", "sealed", "tasks")
        partitions = {n: {key: part[key] for key in keys} for n, part in document["partitions"].items()}
        for name, counts in self.counted.items():
            for key, count in counts.items():
                partitions[name][key] -= count
        for name, part in document["partitions"].items():
            if "run" in part:
                run = {key: part["run"][key] for key in ("step", "rewinds", "skipped", "ended", "blocks_leased")}
                partitions[name]["run"] = {**run, "slots": [ring["slots"] for ring in part["run"]["rings"]]}
        others = [s for s in document["sessions"] if s["role"] != "watch"]
        sessions = [(s["name"], s["role"], s["incarnation"]) for s in others]
        return {"bytes": document["bytes"], "sessions": sessions, "partitions": partitions}

    def _public_id(self, name: str) -> str:
        session = self.engine.sessions.live.get(self.sessions.get(name, "none"))
        return session.public_id if session is not None else "none"

    def _message(self, session: str, request: str, kind: str, f: Answer) -> tuple[m.Request, list[Any]]:
        fields, buffers = dict(f), []
        if "columns" in fields:
            packed = {name: column_from(column) for name, column in fields["columns"].items()}
            fields["columns"], buffers = pack_columns(packed)
        if "tasks" in fields:
            fields["tasks"] = [m.TaskDef(**task) for task in fields["tasks"]]
        if "run" in fields:
            fields["run"] = m.RunDef(**fields["run"])
        if "trainer" in fields:
            fields["trainer"] = self._public_id(fields["trainer"])
        if "lease" in fields:
            fields["lease"] = self.leases.get((f["partition"], f["lease"]), 999_999)
        if kind == "hello":
            return m.Hello(id=request, versions=[m.VERSION], **fields), []
        return KINDS[kind](id=request, session=self.sessions.get(session, "none"), **fields), list(buffers)


def _answer(reply: m.AnyReply, frames: list[Any]) -> Answer:
    found = {"type": str(type(reply).__struct_config__.tag), **msgspec.structs.asdict(reply)}
    found.pop("id")
    if isinstance(reply, (m.Claimed, m.Rows, m.WindowRows)):
        found["columns"] = {name: neutral_from(c) for name, c in unpack_columns(reply.columns, frames).items()}
    if found.get("slot") == -1:
        del found["slot"], found["generation"]
    if slots := found.pop("slots", []):
        found["slots"] = [msgspec.to_builtins(ref) for ref in slots]
    unknown = ("partition", "run", "memory_limit", *(("version", "tag") if found["type"] != "block" else ()))
    for name in unknown:
        found.pop(name, None)
    return found


class Waiter:
    """A request that waits, in a thread of its own."""

    def __init__(self, client: TaskClient, request: m.Request, buffers: list[Any], wait_s: float) -> None:
        self._client = client
        self._found: list[Answer] = []
        self._thread = threading.Thread(target=self._ask, args=(request, buffers, wait_s), daemon=True)
        self._thread.start()

    @property
    def answered(self) -> bool:
        """Whether its answer has come."""
        return bool(self._found)

    def answer(self) -> Answer:
        """The answer, which must come soon."""
        self._thread.join(PATIENCE_S)
        assert self._found, "a waiting request was forgotten"
        self._client.close()
        return self._found[0]

    def _ask(self, request: m.Request, buffers: list[Any], wait_s: float) -> None:
        with suppress(QueueUnreachableError):  # an example ends with its queue, whoever still waits
            self._found.append(_answer(*self._client.transport.exchange(request, buffers, wait_s)))


class DrivenMemory(Driven):
    """The queue inside the process."""

    def __init__(self, limit: int, kept: Path | None = None) -> None:
        super().__init__(limit, kept)
        self.queue = MemoryQueue()
        self.queue.engine = self.begin()

    def restart(self) -> None:
        """Another engine."""
        super().restart()
        self.close()
        self.queue.engine = self.begin()

    def close(self) -> None:
        """Let the journal go."""
        if self.journal is not None:
            self.journal.close()

    def connect(self) -> TaskClient:
        """Another client."""
        return self.queue.connect()

    def lose_reply(self, client: TaskClient, request: m.Request, buffers: list[Any]) -> None:
        """Ask, and look away."""
        client.transport.exchange(request, buffers, 0.0)

    def advance(self, seconds: float) -> None:
        """The engine is told."""
        with self.queue.changed:
            self.clock.now += seconds
            self.engine.tick()
            self.queue.changed.notify_all()


class DrivenServer(Driven):
    """A server on a thread, behind its socket."""

    def __init__(self, limit: int, directory: Path, kept: Path | None = None) -> None:
        super().__init__(limit, kept)
        self.ticks = 0
        self.address = ipc_address(directory)
        self._serve()

    def _serve(self) -> None:
        engine = self.begin()
        tick = engine.tick

        def counting() -> None:
            tick()
            self.ticks += 1

        engine.tick = counting  # type: ignore[method-assign]
        self.server = Server(engine, self.address, journal=self.journal)
        self._thread = threading.Thread(target=self.server.serve)
        self._thread.start()

    def connect(self) -> TaskClient:
        """Another client."""
        return TaskClient(ZmqTransport(self.address, patience_s=PATIENCE_S))

    def lose_reply(self, client: TaskClient, request: m.Request, buffers: list[Any]) -> None:
        """Send on a connection that breaks once the queue has dealt with the request."""
        transport = client.transport
        assert isinstance(transport, ZmqTransport)
        before, connection = self.handled, transport._connection()
        connection.send(m.encode(request), buffers)
        deadline = time.monotonic() + PATIENCE_S
        while self.handled == before:
            assert time.monotonic() < deadline, "a request was not heard"
            time.sleep(0.0002)
        transport._drop(connection)

    def advance(self, seconds: float) -> None:
        """The server has looked at its clock since."""
        before, self.clock.now = self.ticks, self.clock.now + seconds
        while self.ticks < before + 2:
            time.sleep(0.0005)

    def restart(self) -> None:
        """Another server at the same address."""
        super().restart()
        self._stop()
        self._serve()

    def close(self) -> None:
        """Stop serving."""
        for worker in list(self.clients):
            self.leave(worker)
        self._stop()

    def _stop(self) -> None:
        self.server.stop()
        self._thread.join(PATIENCE_S)


@contextmanager
def driven_server(limit: int, directory: Path, kept: Path | None = None) -> Iterator[DrivenServer]:
    """A server with a clock of its own, and with a journal in `kept`."""
    made = DrivenServer(limit, directory, kept)
    try:
        yield made
    finally:
        made.close()
