"""Samples and tasks: orders, leases, refusals, and what a lost lease gives back."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xtoken_core.queue.sample import Status, Task
from xtoken_core.queue.tasks.partition import SPARE_ENTRIES, OrderedSamples
from xtoken_core.wire import QueueError


def one_task(order: Any, *requires: str, attempts: int = 3) -> OrderedSamples:
    return OrderedSamples([Task("use", frozenset(requires or {"x"}), order)], max_attempts=attempts)


def claimed(samples: OrderedSamples, count: int, session: str = "s") -> tuple[int, ...]:
    lease = samples.claim_next(session, "use", count)
    return lease.ids if lease else ()


def test_given_back_sample_without_field_waits() -> None:
    samples = one_task("strict", "x", "y")
    samples.produce([1], ["x", "y"])
    lease = samples.claim_next("a", "use", 1)
    samples.withdraw(1, "y")
    assert samples.samples[1].status["use"] == Status.LEASED
    samples.give_back(lease.id)
    assert samples.samples[1].status["use"] == Status.WAITING


def test_dropping_samples_shortens_their_leases() -> None:
    samples = one_task("by_id")
    samples.produce([1, 2, 3], ["x"])
    lease = samples.claim_ids("a", "use", [1, 2])
    samples.drop([1])
    assert lease.ids == (2,)
    samples.drop([2])
    assert not samples.leases
    assert list(samples.samples) == [3]


def test_given_back_sample_arrives_once() -> None:
    samples = one_task("arrival")
    samples.produce([1], ["x"])
    first = samples.claim_next("s", "use", 1)
    samples.give_back(first.id)
    second = samples.claim_next("s", "use", 1)
    samples.produce([2], ["x"])
    samples.give_back(second.id)
    assert claimed(samples, 3) == (2, 1)


def test_withdrawn_sample_arrives_anew() -> None:
    samples = one_task("arrival", "x", "v")
    samples.produce([1, 2], ["x", "v"])
    samples.withdraw(1, "v")
    samples.produce([1], ["v"])
    assert claimed(samples, 3) == (2, 1)


def test_given_back_samples_keep_strict_order() -> None:
    samples = one_task("strict")
    samples.produce([5, 3, 4], ["x"])
    lease = samples.claim_next("s", "use", 2)
    samples.give_back(lease.id)
    assert claimed(samples, 3) == (5, 3, 4)


def test_unknown_id_is_refused_before_waiting() -> None:
    samples = one_task("by_id", "x", "y")
    samples.produce([1], ["x"])
    with pytest.raises(QueueError, match="sample 9 is not here"):
        samples.claim_ids("s", "use", [1, 9])


@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_entries_of_dropped_samples_are_pruned(order: str) -> None:
    samples = one_task(order)
    for i in range(5 * SPARE_ENTRIES):
        samples.produce([i], ["x"])
        lease = samples.claim_ids("s", "use", [i])
        assert lease is not None
        samples.finish("use", [i])
    assert samples.queue_entries <= SPARE_ENTRIES + 2


OPS = st.lists(
    st.tuples(
        st.sampled_from(["x", "y", "claim", "claim_ids", "finish", "give_back", "refuse", "withdraw", "drop"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@examples(37, 150)
@given(st.sampled_from(["strict", "arrival"]), OPS)
def test_leased_status_matches_leases(order: str, ops: list[tuple[str, int]]) -> None:
    samples = one_task(order, "x", "y", attempts=2)
    for op, number in ops:
        leases = list(samples.leases.values())
        lease = leases[number % len(leases)] if leases else None
        if op in "xy":
            samples.produce([number], [op])
        elif op == "claim":
            samples.claim_next("s", "use", 1 + number % 3)
        elif op == "claim_ids" and number in samples.samples:
            samples.claim_ids(f"s{number % 2}", "use", [number])
        elif op == "withdraw":
            samples.withdraw(number, "y")
        elif op == "drop":
            samples.drop([number])
        elif lease and op == "finish":
            samples.finish("use", lease.ids[:1])
        elif lease and op == "give_back":
            samples.give_back(lease.id)
        elif lease and op == "refuse":
            samples.refuse(lease.id, lease.ids[:1], "broken")
        holders = Counter(i for lease in samples.leases.values() for i in lease.ids)
        leased = {i for i, sample in samples.samples.items() if sample.status["use"] == Status.LEASED}
        assert set(holders) == leased
        assert all(count == 1 for count in holders.values())
        assert all(s.status["use"] != Status.READY or {"x", "y"} <= s.fields for s in samples.samples.values())


@examples(25, 100)
@given(st.sampled_from(["strict", "arrival"]), OPS)
def test_remaining_samples_can_always_be_done(order: str, ops: list[tuple[str, int]]) -> None:
    samples = one_task(order, "x", "y")
    for op, number in ops:
        lease = next(iter(samples.leases.values()), None)
        if op in "xy":
            samples.produce([number], [op])
        elif op == "claim":
            samples.claim_next("s", "use", 1 + number % 3)
        elif op == "withdraw":
            samples.withdraw(number, "y")
        elif lease and op in ("give_back", "finish"):
            samples.finish("use", lease.ids[:1]) if op == "finish" else samples.give_back(lease.id)
    for lease in list(samples.leases.values()):
        samples.give_back(lease.id)
    left = set(samples.samples)
    samples.produce(sorted(left), ["x", "y"])
    done = []
    while ids := claimed(samples, 2):
        done += samples.finish("use", ids)
    assert set(done) == left
