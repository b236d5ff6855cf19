"""Sessions and what hangs on them; requests that are repeated; what a queue refuses."""

import json
import threading
import time
from typing import Any

import pytest

from tests.contract.peers import Forgetful, Place, code_of, ints, public_id
from tests.contract.reference_client import RefusedError

TASKS = [{"name": "a", "requires": ["x"]}]
UP_S = 20.0


def leased(place: Place, **session: Any) -> tuple[Any, str]:
    """A worker that holds samples 0 and 1 of a partition."""
    peer, name = place.worker(**session), place.name("p")
    peer.call("open", partition=name, tasks=TASKS)
    peer.call("put", partition=name, ids=[0, 1], columns={"x": ints([1], [2])})
    assert peer.call("claim", partition=name, task="a", count=2)["ids"] == [0, 1]
    return peer, name


def ready_ids(peer: Any, name: str) -> list[int]:
    ids: list[int] = peer.call("list", partition=name, task="a", state="ready")["ids"]
    return ids


def test_bye_gives_leases_back(place: Place) -> None:
    peer, name = leased(place)
    other = place.worker()
    peer.call("bye")
    assert other.call("claim", partition=name, task="a", count=2)["ids"] == [0, 1]


def test_a_newer_incarnation_takes_over(place: Place) -> None:
    worker = place.name("w")
    old, name = leased(place, name=worker, incarnation=5)
    new = place.worker(name=worker, incarnation=6)
    assert ready_ids(new, name) == [0, 1]
    for kind, fields in (("heartbeat", {"phase": "run"}), ("ack", {"partition": name, "task": "a", "ids": [0]})):
        assert code_of(old, kind, **fields) == "stale_session"
    late = place.connect()
    with pytest.raises(RefusedError) as refused:
        late.hello(worker, "worker", 5)
    assert refused.value.code == "stale_session"
    new.call("heartbeat", phase="run")


def test_same_name_in_another_role_is_another_worker(place: Place) -> None:
    worker = place.name("w")
    one, name = leased(place, role="reader", name=worker)
    place.worker("writer", name=worker, incarnation=2)
    one.call("ack", partition=name, task="a", ids=[0, 1])
    assert [code_of(one, "peek", partition=name, sample=i) for i in (0, 1)] == ["unknown_sample"] * 2


def test_silence_ends_a_session(place: Place) -> None:
    silent, name = leased(place, silence_s=0.2)
    other = place.worker()
    claim = other.call("claim", partition=name, task="a", count=2, wait_s=UP_S)
    assert claim["ids"] == [0, 1]
    assert code_of(silent, "heartbeat", phase="run") == "stale_session"


def test_heartbeats_keep_a_session(place: Place) -> None:
    steady, name = leased(place, silence_s=1.5)
    quiet = place.worker(silence_s=0.1, name=place.name("quiet"))
    watcher = place.worker()
    quiet_id = public_id(quiet.session)
    deadline = time.monotonic() + UP_S
    ended: list[str] = []
    while quiet_id not in ended and time.monotonic() < deadline:
        steady.call("heartbeat", phase="run", progress=3)
        ended = [s["id"] for s in json.loads(watcher.call("stats")["document"])["ended_sessions"]]
    assert quiet_id in ended
    steady.call("ack", partition=name, task="a", ids=[0, 1])


def test_a_call_without_a_session_is_refused(place: Place) -> None:
    peer = place.worker()
    peer.call("bye")
    assert code_of(peer, "stats") == "stale_session"


@pytest.mark.parametrize("losses", [1, 2])
def test_lost_replies_change_nothing(place: Place, losses: int) -> None:
    peer, name = place.connect(), place.name("p")
    lossy = Forgetful(peer)
    watcher = place.worker()

    def call(kind: str, **fields: Any) -> Any:
        lossy.losses = losses
        reply = peer.call(kind, **fields)
        assert lossy.losses == 0
        return reply

    lossy.losses = losses
    peer.hello(place.name("w"), "worker", 3)
    call("open", partition=name, tasks=TASKS)
    call("put", partition=name, ids=[0, 1, 2, 3], columns={"x": ints([0], [1], [2], [3])})
    first = call("claim", partition=name, task="a", count=2, fields=["x"])
    assert (first["ids"], first["columns"]) == ([0, 1], {"x": ints([0], [1])})
    second = call("claim", partition=name, task="a", count=1)
    assert second["ids"] == [2]
    call("nack", partition=name, lease=second["lease"], ids=[2], reason="no")
    assert watcher.call("peek", partition=name, sample=2)["attempts"] == 1
    call("complete", partition=name, lease=first["lease"], columns={"y": ints([5], [6])})
    assert peer.call("claim", partition=name, task="a", count=9)["ids"] == [2, 3]
    call("ack", partition=name, task="a", ids=[2, 3])
    call("seal", partition=name)
    assert code_of(peer, "claim", partition=name, task="a", count=1) == "exhausted"
    call("clear", partition=name, everything=True)
    assert code_of(peer, "put", partition=name, ids=[0], columns={"x": ints()}) == "bad_request"


def test_lost_reply_to_a_waiting_claim(place: Place) -> None:
    peer, name = place.worker(), place.name("p")
    producer = place.worker()
    peer.call("open", partition=name, tasks=TASKS)
    lossy = Forgetful(peer)
    claims: list[Any] = []

    def consume() -> None:
        lossy.losses = 1 if place.memory is None else 0
        claims.append(peer.call("claim", partition=name, task="a", count=1, wait_s=UP_S))

    thread = threading.Thread(target=consume)
    thread.start()
    producer.call("put", partition=name, ids=[0, 1], columns={"x": ints([0], [1])})
    thread.join(UP_S)
    assert [claim["ids"] for claim in claims] == [[0]]
    assert ready_ids(producer, name) == [1]


def test_several_threads_in_one_session(place: Place) -> None:
    peer, name = place.worker(), place.name("p")
    peer.call("open", partition=name, tasks=TASKS)
    taken: list[int] = []

    def of_this_thread() -> Any:
        if place.kind == "library":
            return peer
        other = place.connect()
        other.session = peer.session
        return other

    def work(start: int) -> None:
        mine = of_this_thread()
        for i in range(start, start + 20):
            mine.call("put", partition=name, ids=[i], columns={"x": ints([i])})
        for _ in range(20):
            ids = mine.call("claim", partition=name, task="a", count=1, wait_s=UP_S)["ids"]
            mine.call("ack", partition=name, task="a", ids=ids)
            taken.extend(ids)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(taken) == [100 * n + i for n in range(4) for i in range(20)]


def test_statistics_count_what_is_there(place: Place) -> None:
    peer, name = leased(place)
    document = json.loads(peer.call("stats")["document"])
    part = document["partitions"][name]
    assert part["tasks"] == {"a": {"waiting": 0, "ready": 0, "leased": 2, "done": 0}}
    assert (part["samples"], part["leases"], part["dead"], part["sealed"]) == (2, 1, 0, False)
    assert part["bytes"] == 2 * 8 + 3 * 8
    assert document["requests"]["claim"] >= 1
    mine = [s for s in document["sessions"] if s["id"] == public_id(peer.session)]
    assert [s["role"] for s in mine] == ["worker"]
    assert document["bytes"] <= document["memory_limit"]
