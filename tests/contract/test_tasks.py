"""Tasks: who gets which sample when, and what becomes of it."""

import threading
from typing import Any

import pytest

from tests.contract.peers import Place, code_of, ints
from tests.contract.reference_client import RefusedError
from tests.support.waiting import until

UP_S = 20.0


def opened(place: Place, *tasks: dict[str, Any], **definition: Any) -> tuple[Any, str]:
    """A worker, and a partition of its own."""
    peer, name = place.worker(), place.name("p")
    peer.call("open", partition=name, tasks=list(tasks), **definition)
    return peer, name


def task(name: str, *requires: str, order: str = "strict") -> dict[str, Any]:
    return {"name": name, "requires": list(requires), "order": order}


def put(peer: Any, name: str, *ids: int, field: str = "x") -> None:
    peer.call("put", partition=name, ids=list(ids), columns={field: ints(*([i, i] for i in ids))})


def claimed(peer: Any, name: str, task: str, count: int, **options: Any) -> list[int] | None:
    reply = peer.call("claim", partition=name, task=task, count=count, **options)
    return None if reply is None else list(reply["ids"])


def state(peer: Any, name: str, task: str) -> dict[str, list[int]]:
    states = ("waiting", "ready", "leased", "done")
    found = {s: peer.call("list", partition=name, task=task, state=s)["ids"] for s in states}
    return {s: ids for s, ids in found.items() if ids}


def test_a_claim_brings_the_rows_along(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    put(peer, name, 3, 4, 5)
    reply = peer.call("claim", partition=name, task="a", count=2, fields=["x"])
    assert (reply["ids"], reply["columns"]) == ([3, 4], {"x": ints([3, 3], [4, 4])})
    assert state(peer, name, "a") == {"ready": [5], "leased": [3, 4]}


def test_strict_order_waits_for_what_was_put_first(place: Place) -> None:
    peer, name = opened(place, task("a", "x", "y"))
    put(peer, name, 7, 8)
    put(peer, name, 8, field="y")
    assert claimed(peer, name, "a", 2) is None
    put(peer, name, 7, field="y")
    assert claimed(peer, name, "a", 2) == [7, 8]


def test_arrival_order_takes_what_is_ready(place: Place) -> None:
    peer, name = opened(place, task("a", "x", "y", order="arrival"))
    put(peer, name, 7, 8, 9)
    put(peer, name, 9, 8, field="y")
    assert claimed(peer, name, "a", 3) == [9, 8]
    assert claimed(peer, name, "a", 3) is None


def test_claims_by_ids_take_all_or_nothing(place: Place) -> None:
    peer, name = opened(place, task("a", "x", order="by_id"))
    put(peer, name, 1, 2)
    put(peer, name, 3, field="z")
    assert peer.call("claim", partition=name, task="a", ids=[2, 3, 1]) is None
    reply = peer.call("claim", partition=name, task="a", ids=[2, 1], fields=["x"])
    assert (reply["ids"], reply["columns"]) == ([2, 1], {"x": ints([2, 2], [1, 1])})
    again = peer.call("claim", partition=name, task="a", ids=[2, 1])
    assert again["lease"] == reply["lease"]
    for worker in (peer, place.worker()):
        assert worker.call("claim", partition=name, task="a", ids=[1]) is None
    assert code_of(peer, "claim", partition=name, task="a", count=1) == "bad_request"
    assert code_of(peer, "claim", partition=name, task="a", ids=[1, 1]) == "bad_request"
    assert code_of(peer, "claim", partition=name, task="a", ids=[1], count=1) == "bad_request"


def test_a_claim_of_ids_that_are_not_here_is_refused(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    assert code_of(peer, "claim", partition=name, task="a", ids=[17]) == "unknown_sample"


def test_tasks_are_independent_and_the_last_frees_memory(place: Place) -> None:
    peer, name = opened(place, task("a", "x"), task("b", "x"))
    put(peer, name, 0, 1)
    assert claimed(peer, name, "a", 9) == [0, 1]
    peer.call("ack", partition=name, task="a", ids=[0, 1])
    assert state(peer, name, "b") == {"ready": [0, 1]}
    assert claimed(peer, name, "b", 1) == [0]
    peer.call("ack", partition=name, task="b", ids=[0])
    assert code_of(peer, "peek", partition=name, sample=0) == "unknown_sample"
    assert peer.call("peek", partition=name, sample=1)["status"] == {"a": "done", "b": "ready"}
    put(peer, name, 0)
    assert code_of(peer, "peek", partition=name, sample=0) == "unknown_sample"


def test_ack_in_parts_of_several_leases(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    put(peer, name, *range(6))
    first, second = claimed(peer, name, "a", 3), claimed(peer, name, "a", 3)
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    peer.call("ack", partition=name, task="a", ids=[1, 4])
    assert state(peer, name, "a") == {"leased": [0, 2, 3, 5]}
    peer.call("ack", partition=name, task="a", ids=[1, 4, 0])
    assert state(peer, name, "a") == {"leased": [2, 3, 5]}


def test_ack_of_a_foreign_lease_is_refused(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    other = place.worker()
    put(peer, name, 0)
    claimed(peer, name, "a", 1)
    assert code_of(other, "ack", partition=name, task="a", ids=[0]) == "lease_revoked"
    assert state(peer, name, "a") == {"leased": [0]}


def test_complete_puts_and_acks_in_one(place: Place) -> None:
    peer, name = opened(place, task("a", "x"), task("b", "y"))
    put(peer, name, 0, 1)
    lease = peer.call("claim", partition=name, task="a", count=2)["lease"]
    assert claimed(peer, name, "b", 2) is None
    peer.call("complete", partition=name, lease=lease, columns={"y": ints([10], [11])})
    reply = peer.call("claim", partition=name, task="b", count=2, fields=["x", "y"])
    assert reply["columns"] == {"x": ints([0, 0], [1, 1]), "y": ints([10], [11])}
    assert code_of(peer, "complete", partition=name, lease=lease) == "lease_revoked"


def test_nack_counts_and_makes_a_dead_letter(place: Place) -> None:
    peer, name = opened(place, task("a", "x"), task("b", "x"), max_attempts=2)
    put(peer, name, 0, 1)
    for attempt in (1, 2):
        reply = peer.call("claim", partition=name, task="a", count=2)
        assert reply["ids"] == [0, 1]
        peer.call("nack", partition=name, lease=reply["lease"], ids=[1], reason=f"bad, {attempt}")
    assert claimed(peer, name, "a", 2) == [0]
    dead = peer.call("list", partition=name, state="dead")
    assert (dead["ids"], dead["reasons"]) == ([1], {1: "bad, 2"})
    seen = peer.call("peek", partition=name, sample=1)
    assert (seen["attempts"], seen["reason"], set(seen["fields"])) == (2, "bad, 2", {"x"})
    assert claimed(peer, name, "b", 2) == [0]
    reply = place.worker().call("claim", partition=name, task="b", ids=[1])
    assert (reply["ids"], reply["dead"]) == ([], [1])
    peer.call("clear", partition=name, ids=[1])
    assert peer.call("list", partition=name, state="dead")["ids"] == []


def test_sealing_exhausts(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    put(peer, name, 0)
    assert claimed(peer, name, "a", 5) == [0]
    assert claimed(peer, name, "a", 5) is None
    peer.call("seal", partition=name)
    assert code_of(peer, "put", partition=name, ids=[1], columns={"x": ints([1])}) == "conflict"
    assert claimed(peer, name, "a", 5) is None
    peer.call("ack", partition=name, task="a", ids=[0])
    assert code_of(peer, "claim", partition=name, task="a", count=5) == "exhausted"


def test_waiting_claim_is_answered_by_put_and_seal(place: Place) -> None:
    consumer, name = opened(place, task("a", "x"))
    producer = place.worker()
    seen: list[Any] = []

    def consume() -> None:
        for _ in range(2):
            try:
                ids = claimed(consumer, name, "a", 4, wait_s=UP_S)
            except RefusedError as error:
                seen.append(error.code)
                return
            seen.append(ids)
            consumer.call("ack", partition=name, task="a", ids=ids)

    thread = threading.Thread(target=consume)
    thread.start()
    put(producer, name, 5)
    until(lambda: not state(producer, name, "a"))
    producer.call("seal", partition=name)
    thread.join(UP_S)
    assert seen == [[5], "exhausted"]


def test_clear_by_ids_and_everything(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    put(peer, name, 0, 1, 2)
    lease = peer.call("claim", partition=name, task="a", count=2)["lease"]
    peer.call("clear", partition=name, ids=[1])
    put(peer, name, 1)
    assert state(peer, name, "a") == {"ready": [2], "leased": [0]}
    peer.call("seal", partition=name)
    peer.call("clear", partition=name, everything=True)
    assert state(peer, name, "a") == {}
    assert code_of(peer, "complete", partition=name, lease=lease) == "lease_revoked"
    peer.call("put", partition=name, ids=[2, 1], columns={"x": ("object", "", (), ["two", "one"])})
    assert claimed(peer, name, "a", 5) == [2, 1]


def test_list_goes_on_after_an_id(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    put(peer, name, *range(10))
    pages = [peer.call("list", partition=name, task="a", state="ready", after=a, limit=4)["ids"] for a in (-1, 3, 7)]
    assert pages == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert code_of(peer, "list", partition=name, task="a", state="merry") == "bad_request"
    assert code_of(peer, "list", partition=name, task="z", state="ready") == "unknown_task"


def test_volatile_fields_go_with_their_session(place: Place) -> None:
    peer, name = opened(place, task("teach", "x"), task("train", "x", "y"), volatile=["y"])
    teacher = place.worker("teacher")
    put(peer, name, 0, 1)
    lease = teacher.call("claim", partition=name, task="teach", count=2)["lease"]
    teacher.call("complete", partition=name, lease=lease, columns={"y": ints([1], [2])})
    assert claimed(peer, name, "train", 1) == [0]
    assert state(peer, name, "train") == {"ready": [1], "leased": [0]}
    teacher.call("bye")
    assert state(peer, name, "train") == {"waiting": [1], "leased": [0]}
    assert state(peer, name, "teach") == {"ready": [0, 1]}
    assert code_of(peer, "get", partition=name, ids=[1], fields=["y"]) == "unknown_sample"
    second = place.worker("teacher")
    lease = second.call("claim", partition=name, task="teach", ids=[1])["lease"]
    second.call("complete", partition=name, lease=lease, columns={"y": ints([3])})
    assert peer.call("claim", partition=name, task="train", ids=[1], fields=["y"])["columns"] == {"y": ints([3])}


def test_a_task_completed_by_a_volatile_field_that_is_there_goes_with_its_owner(place: Place) -> None:
    peer, name = opened(place, task("teach", "x"), task("check", "x"), task("train", "y"), volatile=["y"])
    teacher, checker = place.worker("teacher"), place.worker("checker")
    put(peer, name, 0)
    lease = teacher.call("claim", partition=name, task="teach", count=1)["lease"]
    other = checker.call("claim", partition=name, task="check", count=1)["lease"]
    put(teacher, name, 0, field="y")
    teacher.call("complete", partition=name, lease=lease, columns={"y": ints([1])})
    checker.call("complete", partition=name, lease=other, columns={"y": ints([1])})
    checker.call("bye")
    assert [state(peer, name, which) for which in ("teach", "check", "train")] == [
        {"done": [0]}, {"done": [0]}, {"ready": [0]},
    ]  # fmt: skip
    teacher.call("bye")
    assert [state(peer, name, which) for which in ("teach", "check", "train")] == [
        {"ready": [0]}, {"ready": [0]}, {"waiting": [0]},
    ]  # fmt: skip


def test_a_claim_that_cannot_be_read_leases_nothing(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    put(peer, name, 0)
    assert code_of(peer, "claim", partition=name, task="a", count=1, fields=["z"]) == "unknown_sample"
    assert state(peer, name, "a") == {"ready": [0]}
    assert claimed(place.worker(), name, "a", 1) == [0]


def test_partitions_stand_side_by_side(place: Place) -> None:
    peer, one = opened(place, task("a", "x"))
    _, two = opened(place, task("a", "x"))
    put(peer, one, 1)
    put(peer, two, 2)
    assert claimed(peer, two, "a", 5) == [2]
    assert claimed(peer, one, "a", 5) == [1]
    peer.call("open", partition=one, tasks=[task("a", "x")])
    assert code_of(peer, "open", partition=one, tasks=[task("b", "x")]) == "conflict"
    assert code_of(peer, "put", partition="nowhere", ids=[1], columns={"x": ints([1])}) == "unknown_partition"
    assert code_of(peer, "claim", partition=one, task="b", count=1) == "unknown_task"
    assert code_of(peer, "open", partition=place.name("p"), tasks=[task("a"), task("a")]) == "bad_request"


def test_room_is_told_refused_and_waited_for(small_place: Place) -> None:
    peer, name = opened(small_place, task("a", "x"))
    block = {"x": ("dense", "uint8", (120_000,), [b"\1" * 120_000])}
    assert peer.call("put", partition=name, ids=[0], columns=block).get("room", 1) > 0
    peer.call("put", partition=name, ids=[1], columns=block)
    with pytest.raises(RefusedError) as refused:
        peer.call("put", partition=name, ids=[2], columns=block)
    assert refused.value.code == "no_room"
    assert 0 <= refused.value.detail["room"] < 120_000
    assert peer.call("room", partition=name, bytes=120_000, wait_s=0.05) is None
    assert code_of(peer, "room", partition=name, bytes=1 << 20) == "too_large"
    assert claimed(peer, name, "a", 1) == [0]
    peer.call("ack", partition=name, task="a", ids=[0])
    assert peer.call("room", partition=name, bytes=120_000, wait_s=5.0)["room"] >= 120_000
    peer.call("put", partition=name, ids=[2], columns=block)


def test_a_buffer_beyond_the_memory_limit_is_refused_at_once(small_place: Place) -> None:
    peer, name = opened(small_place, task("a", "x"))
    if small_place.kind == "reference":
        assert small_place.connect().hello("other", "worker", 1)["memory_limit"] == 1 << 18
        return
    wide = {"x": ("dense", "uint8", (1 << 19,), [bytes(1 << 19)])}
    with pytest.raises(
        RefusedError, match="a buffer of 524288 bytes, and the queue's memory limit is 262144"
    ) as refused:
        peer.call("put", partition=name, ids=[0], columns=wide)
    assert refused.value.code == "too_large"
    peer.call("put", partition=name, ids=[0], columns={"x": ("dense", "uint8", (9,), [bytes(9)])})


def test_mostly_done_batch_frees_its_memory(small_place: Place) -> None:
    peer, name = opened(small_place, task("a", "x", order="by_id"))
    rows = [bytes([i]) * 2400 for i in range(100)]
    peer.call("put", partition=name, ids=list(range(100)), columns={"x": ("jagged", "uint8", (), rows)})
    peer.call("claim", partition=name, task="a", ids=list(range(99)))
    peer.call("ack", partition=name, task="a", ids=list(range(99)))
    assert peer.call("room", partition=name, bytes=240_000, wait_s=1.0)["room"] >= 240_000
    assert peer.call("get", partition=name, ids=[99], fields=["x"])["columns"]["x"][3] == [rows[99]]


def test_volatile_field_belongs_to_its_session(place: Place) -> None:
    peer, name = opened(place, task("a", "v"), volatile=["v"])
    first, second = place.worker(), place.worker()
    put(first, name, 0, field="v")
    second.call("put", partition=name, ids=[0, 1], columns={"v": ints([5], [6]), "x": ints([7], [8])})
    second.call("bye")
    assert state(peer, name, "a") == {"ready": [0], "waiting": [1]}
    first.call("bye")
    assert state(peer, name, "a") == {"waiting": [0, 1]}


def test_get_does_not_wait_for_finished_samples(place: Place) -> None:
    peer, name = opened(place, task("a", "x"))
    put(peer, name, 3)
    peer.call("clear", partition=name, ids=[3])
    assert code_of(peer, "get", partition=name, ids=[6, 3], fields=["x"], wait_s=5.0) == "unknown_sample"
    assert peer.call("get", partition=name, ids=[6], fields=["x"], wait_s=0.05) is None


def test_results_have_room_beyond_the_limit(small_place: Place) -> None:
    peer, name = opened(small_place, task("a", "x"), task("b", "y"))
    block = ("dense", "uint8", (120_000,), [b"\1" * 120_000])
    for sample in range(2):
        peer.call("put", partition=name, ids=[sample], columns={"x": block})
    leases = [peer.call("claim", partition=name, task="a", count=1)["lease"] for _ in range(2)]
    peer.call("complete", partition=name, lease=leases[0], columns={"y": block})
    wide = ("dense", "uint8", (200_000,), [b"\1" * 200_000])
    assert code_of(peer, "complete", partition=name, lease=leases[1], columns={"z": wide}) == "no_room"
    assert state(peer, name, "a") == {"leased": [1], "done": [0]}
    peer.call("complete", partition=name, lease=leases[1], columns={"y": block})
