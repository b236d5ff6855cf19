"""Order in which samples are handed out again, and pruning of stale entries."""

import pytest

from xtoken_core.queue.sample import Task
from xtoken_core.queue.tasks.partition import SPARE_ENTRIES, OrderedSamples
from xtoken_core.wire import QueueError


def of(order: str, *requires: str) -> OrderedSamples:
    return OrderedSamples([Task("t", frozenset(requires or ("x",)), order)])  # type: ignore[arg-type]


def taken(samples: OrderedSamples, count: int) -> tuple[int, ...]:
    lease = samples.claim_next("s", "t", count)
    return () if lease is None else lease.ids


def test_given_back_sample_arrives_once() -> None:
    samples = of("arrival")
    samples.produce([1], ["x"])
    first = samples.claim_next("s", "t", 1)
    samples.give_back(first.id)
    second = samples.claim_next("s", "t", 1)
    samples.produce([2], ["x"])
    samples.give_back(second.id)
    assert taken(samples, 3) == (2, 1)


def test_withdrawn_sample_arrives_anew() -> None:
    samples = of("arrival", "x", "v")
    samples.produce([1, 2], ["x", "v"])
    samples.withdraw(1, "v")
    samples.produce([1], ["v"])
    assert taken(samples, 3) == (2, 1)


def test_unknown_id_is_refused_before_waiting() -> None:
    samples = of("by_id", "x", "y")
    samples.produce([1], ["x"])
    with pytest.raises(QueueError, match="sample 9 is not here"):
        samples.claim_ids("s", "t", [1, 9])


@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_entries_of_dropped_samples_are_pruned(order: str) -> None:
    samples = of(order)
    for i in range(5 * SPARE_ENTRIES):
        samples.produce([i], ["x"])
        lease = samples.claim_ids("s", "t", [i])
        assert lease is not None
        samples.finish("t", [i])
    assert samples.queue_entries <= SPARE_ENTRIES + 2
