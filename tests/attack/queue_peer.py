"""Attacks by a peer that has the queue's token: what it sends, holds and never reads."""

import json
import random
import secrets
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgpack
import zmq

from tests.attack.target import Attack, FaultError, Target, connect
from tests.contract.attacker import Attacker
from tests.contract.fuzz import corpus, mutated
from tests.contract.reference_client import Client, RefusedError, UnreachableError
from xtoken_core.wire.bounds import MAX_OBJECT_BYTES, MAX_OBJECT_VALUES
from xtoken_services.queue.server import FAILED

MANY_IDS = 65_536
BIG_ID = 1 << 40
"""First id of long lists: nine bytes each in msgpack."""
FRAME_BYTES = 60 << 20
"""A frame that a queue with the stage's limit receives."""
REFUSED = (RefusedError, UnreachableError, OSError, zmq.ZMQError)


@contextmanager
def own_partition(target: Target, **definition: Any) -> Iterator[tuple[Client, str]]:
    """Open a session and a partition, and clear it at the end."""
    peer, name = target.peer(), f"attack-{secrets.token_hex(4)}"
    definition.setdefault("tasks", [{"name": "a", "requires": ["x"]}])
    peer.call("open", partition=name, **definition)
    try:
        yield peer, name
    finally:
        with suppress(*REFUSED):
            peer.call("clear", partition=name, everything=True)
            peer.call("bye")
        peer.close()


@contextmanager
def bare_socket(target: Target) -> Iterator[zmq.Socket[bytes]]:
    """Connect an authenticated socket whose replies are never read."""
    context = zmq.Context()
    bare = context.socket(zmq.DEALER)
    bare.sndtimeo, bare.linger = 5_000, 0
    target.queue.authenticate(bare)
    bare.connect(target.queue.url)
    try:
        yield bare
    finally:
        bare.close(linger=0)
        context.term()


def send(bare: zmq.Socket[bytes], kind: str, *buffers: bytes, **fields: Any) -> None:
    """Send a request without waiting for its reply."""
    header = {"type": kind, "id": f"{secrets.token_hex(8)}.1", **fields}
    bare.send_multipart([msgpack.packb(header, use_bin_type=True), *buffers])


def put_raw(target: Target, heads: list[dict[str, Any]], *buffers: bytes) -> str:
    """Put two rows, each with hand-made heads and buffers, claim both, and return what the put was answered.

    Raises:
        FaultError: The rows were stored and cannot be claimed.
    """
    with own_partition(target) as (peer, name):
        for number in (1, 2):
            header = {"type": "put", "session": peer.session, "partition": name, "ids": [number], "columns": heads}
            reply, _ = peer.exchange({**header, "id": f"{peer.lane}-raw.{number}"}, list(buffers))
            if reply["type"] == "error":
                return str(reply["code"])
        try:
            peer.call("claim", partition=name, task="a", count=2, fields=["x"])
        except RefusedError as error:
            status = peer.call("peek", partition=name, sample=1)
            raise FaultError(f"rows were stored that cannot be claimed ({error}): {status['status']}") from error
        return "stored"


# What is sent


def empty_frames(target: Target, rng: random.Random, seconds: float) -> None:
    """Send a message of millions of empty frames."""
    attacker = Attacker(target.queue)
    attacker.socket.settimeout(seconds)
    with suppress(OSError):
        for _ in range(rng.randint(5, 60)):
            attacker.socket.sendall(b"\x01\x00" * 100_000)
        attacker.socket.sendall(b"\x00\x00")
    attacker.cut(seconds)
    attacker.close()


def endless_message(target: Target, rng: random.Random, seconds: float) -> None:
    """Send a message that never ends, in frames of a random size."""
    attacker = Attacker(target.queue)
    attacker.flood(1 << 30, frame=rng.choice((1, 100, 10_000, 1 << 20)), seconds=seconds / 2)
    attacker.close()


def parts_of_messages(target: Target, rng: random.Random, seconds: float) -> None:
    """Send a part of a large message on each of many connections, beside others that send nothing."""
    end = time.monotonic() + seconds
    part, many = bytes(rng.choice((1 << 16, 1 << 20, 1 << 25))), rng.choice((4, 200, 1200))
    with ExitStack() as stack:
        for _ in range(rng.choice((0, 1500))):
            stack.callback(Attacker(target.queue).close)
        held: deque[Attacker] = deque()
        while time.monotonic() < end:
            with suppress(OSError):
                held.append(Attacker(target.queue))
                stack.callback(held[-1].close)
                held[-1].begin(FRAME_BYTES)
                held[-1].socket.sendall(part)
            if len(held) > many:
                held.popleft().close()


def poisoned_offsets(target: Target, rng: random.Random, seconds: float) -> None:
    """Put rows whose offsets and shapes multiply to nothing or to more than there is."""
    del seconds
    for shape in ([0], [0, 1 << 40], [1 << 62, 0], [rng.randrange(3), 0]):
        for last in ((1 << 63) - 1, 1 << 62, 1 << 40, -1):
            head = {"name": "x", "kind": "jagged", "dtype": "int64", "rows": 1, "item_shape": shape}
            put_raw(target, [head], struct.pack("<2q", 0, last), b"")


def odd_columns(target: Target, rng: random.Random, seconds: float) -> None:
    """Put columns that the protocol excludes: bytes other than 0 and 1 as bool, objects with a dtype."""
    del rng, seconds
    head = {"name": "x", "kind": "dense", "dtype": "bool", "rows": 1, "item_shape": []}
    if put_raw(target, [head], b"\x07") == "stored":
        raise FaultError("bool 7 was stored")
    head = {"name": "x", "kind": "object", "dtype": "int64", "rows": 1, "item_shape": []}
    if put_raw(target, [head], struct.pack("<2q", 0, 1), b"\x07") == "stored":
        raise FaultError("an object column with a dtype was stored")


def mutated_messages(target: Target, rng: random.Random, seconds: float) -> None:
    """Send every golden request with random faults, in the name of a worker that the run does not have."""
    with own_partition(target) as (peer, name), bare_socket(target) as bare:
        requests = [
            # A hello in a worker's own name and incarnation replaces it, as the protocol says.
            [frames[0].replace(b"\xa5train", msgpack.packb(name)).replace(b"trainer-0", b"mutated-0"), *frames[1:]]
            for frames in corpus(peer.session, ("train",))
        ]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(zmq.Again):
                bare.send_multipart(mutated(rng, rng.choice(requests)))
            while bare.poll(0):
                reply = bare.recv_multipart()[0]
                if FAILED.encode() in reply:
                    raise FaultError(f"the queue failed on a malformed message: {reply!r}")


def nested_header(target: Target, rng: random.Random, seconds: float) -> None:
    """Send headers nested a hundred thousand levels deep, and ids of any length."""
    del rng, seconds
    with bare_socket(target) as bare:
        bodies = [
            b"\x91" * 100_000 + b"\xc0",
            b"\x81\xa4type" * 20_000,
            msgpack.packb({"type": "x" * 1_000_000, "id": "a"}),
        ]
        for body in bodies:
            bare.send_multipart([body])
            if not bare.poll(5_000):
                raise FaultError(f"no answer within 5 s to a header that begins with {body[:20]!r}")
            bare.recv_multipart()


# What the queue is made to hold


def empty_rows(target: Target, rng: random.Random, seconds: float) -> None:
    """Put millions of rows of no bytes."""
    del rng
    with own_partition(target) as (peer, name):
        end, first = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            ids = list(range(BIG_ID + first, BIG_ID + first + MANY_IDS))
            first += MANY_IDS
            try:
                peer.call("put", partition=name, ids=ids, columns={"x": ("dense", "int64", (0,), [b""] * MANY_IDS)})
            except REFUSED:
                return


def parked_gets(target: Target, rng: random.Random, seconds: float) -> None:
    """Let long requests wait for rows that never come."""
    with own_partition(target) as (peer, name), ExitStack() as stack:
        sockets = [stack.enter_context(bare_socket(target)) for _ in range(4)]
        for number in range(40):
            count = rng.choice((MANY_IDS, 1_000_000))
            ids = list(range(BIG_ID + number * count, BIG_ID + (number + 1) * count))
            with suppress(zmq.Again):
                send(
                    sockets[number % 4], "get", session=peer.session, partition=name, ids=ids, fields=["x"], wait_s=60.0
                )
        time.sleep(seconds)


def parked_claims(target: Target, rng: random.Random, seconds: float) -> None:
    """Let a hundred claims of all ids wait for the last one, and put the others one by one."""
    tasks = [{"name": "a", "requires": ["x"], "order": "by_id"}]
    with own_partition(target, tasks=tasks) as (peer, name), bare_socket(target) as bare:
        ids = list(range(MANY_IDS))
        row = ("dense", "int64", (), [bytes(8)] * MANY_IDS)
        with suppress(*REFUSED):
            peer.call("put", partition=name, ids=ids[:-1], columns={"x": (*row[:3], row[3][:-1])})
            for _ in range(100):
                send(bare, "claim", session=peer.session, partition=name, task="a", ids=ids, count=0, wait_s=60.0)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                number = MANY_IDS + rng.randrange(1 << 40)
                peer.call("put", partition=name, ids=[number], columns={"x": (*row[:3], row[3][:1])})


def documents(target: Target, rng: random.Random, seconds: float) -> None:
    """Open partitions with large documents."""
    peer, names = target.peer(), []
    end = time.monotonic() + seconds
    run = {"positions": 8, "samples_per_step": 4, "block_size": 4, "span": 16, "teachers": 1, "ranks": 1, "slots": 2}
    try:
        for number in range(1200):
            if time.monotonic() > end:
                break
            names.append(f"attack-{secrets.token_hex(4)}")
            peer.call(
                "open",
                partition=names[-1],
                tasks=[],
                run={**run, "document": rng.randbytes(4 << 20 if number < 200 else 1)},
            )
    except REFUSED:
        pass
    finally:
        for name in names:
            with suppress(*REFUSED):
                peer.call("clear", partition=name, everything=True)
        peer.close()


def kept_answers(target: Target, rng: random.Random, seconds: float) -> None:
    """Ask on 256 lanes of several sessions for long lists, which the queue keeps for repetitions."""
    end = time.monotonic() + seconds
    with own_partition(target) as (peer, name), ExitStack() as stack, suppress(*REFUSED):
        ids = list(range(BIG_ID, BIG_ID + MANY_IDS))
        column = ("dense", "uint8", (), [b"0"] * MANY_IDS)
        peer.call("put", partition=name, ids=ids, columns={"x": column})
        for _ in range(rng.randint(4, 12)):
            session = target.peer()
            stack.callback(session.close)
            bare = stack.enter_context(bare_socket(target))
            for _ in range(256):
                send(bare, "list", session=session.session, partition=name, state="ready", task="a", limit=MANY_IDS)
                if not bare.poll(5_000) or time.monotonic() > end:
                    return
                bare.recv_multipart()


def object_rows(target: Target, rng: random.Random, seconds: float) -> None:
    """Put rows of up to a mebibyte each, as many as the queue receives at once, of values of one byte or a few.

    Raises:
        FaultError: Rows with more values than the bound are stored.
    """
    items = (b"\x80", b"\x90", b"\x01", b"\xa1a", b"\x91\xc0", b"\x81\x01\xc0", b"\x91" * 14 + b"\xc0")
    end = time.monotonic() + seconds
    with ExitStack() as stack, suppress(*REFUSED):
        peer, name = stack.enter_context(own_partition(target))
        sockets = [stack.enter_context(bare_socket(target)) for _ in range(rng.randint(1, 4))]
        while time.monotonic() < end:
            item, rows = rng.choice(items), rng.choice((1, 15, 60))
            count = min(rng.choice((MAX_OBJECT_BYTES, MAX_OBJECT_VALUES // 16)), (MAX_OBJECT_BYTES - 5) // len(item))
            row = b"\xdd" + count.to_bytes(4, "big") + item * count
            head = {"name": "x", "kind": "object", "dtype": "", "rows": rows, "item_shape": []}
            offsets = struct.pack(f"<{rows + 1}q", *range(0, len(row) * rows + 1, len(row)))
            first = rng.randrange(BIG_ID - rows) + (BIG_ID if rows * count > MAX_OBJECT_VALUES else 0)
            fields = {"session": peer.session, "partition": name, "ids": [*range(first, first + rows)]}
            bare = rng.choice(sockets)
            with suppress(zmq.Again):
                send(bare, "put", offsets, row * rows, columns=[head], **fields)
            while bare.poll(0):
                bare.recv_multipart()
        if peer.call("list", partition=name, state="ready", task="a", after=BIG_ID - 1, limit=1)["ids"]:
            raise FaultError(f"object rows of more than {MAX_OBJECT_VALUES} values were stored")


def long_names(target: Target, rng: random.Random, seconds: float) -> None:
    """Open sessions with names, roles and phases of any length."""
    end = time.monotonic() + seconds
    peers = []
    try:
        while time.monotonic() < end and len(peers) < 200:
            peers.append(target.peer("n" * rng.choice((300, 100_000, 1_000_000)) + secrets.token_hex(4)))
            peers[-1].call("heartbeat", phase="p" * 100_000)
    except REFUSED:
        pass
    finally:
        for peer in peers:
            with suppress(*REFUSED):
                peer.call("bye")
            peer.close()


# What one peer may do to another


def stolen_sessions(target: Target, rng: random.Random, seconds: float) -> None:
    """Act with the session ids that `stats` reveals.

    Raises:
        FaultError: Another worker's session can be used.
    """
    del rng, seconds
    with own_partition(target) as (peer, _):
        document = json.loads(peer.call("stats")["document"])
        for session in document["sessions"]:
            if session.get("id") and session["id"] != peer.session:
                header = {"type": "heartbeat", "session": session["id"], "id": f"{peer.lane}.stolen", "phase": "run"}
                reply, _ = peer.exchange(header, [])
                if reply["type"] != "error":
                    raise FaultError(f"stats reveals the session of {session['name']}, which can be used")


def lock_out(target: Target, rng: random.Random, seconds: float) -> None:
    """Take the name of a worker with the largest incarnation and a day of silence.

    Raises:
        FaultError: The worker cannot return.
    """
    del rng, seconds
    name = f"victim-{secrets.token_hex(4)}"
    thief = connect(target.queue)
    with suppress(RefusedError):
        thief.hello(name, "library", (1 << 63) - 1, silence_s=86_400.0)
    thief.close()
    victim = connect(target.queue)
    try:
        victim.hello(name, "library", time.time_ns())
    except RefusedError as error:
        raise FaultError(f"a worker is locked out of its name: {error}") from error
    finally:
        victim.close()


ATTACKS: dict[str, Attack] = {
    f"queue.{attack.__name__}": attack
    for attack in (
        empty_frames, endless_message, parts_of_messages, poisoned_offsets, odd_columns, mutated_messages,
        nested_header, empty_rows, parked_gets, parked_claims, documents, kept_answers, object_rows, long_names,
        stolen_sessions, lock_out,
    )
}  # fmt: skip
