"""Slots, signals and rings of a run, call by call."""

import pytest

from tests.unit.queue.run_calls import (
    TEACHER,
    TRAINER,
    ack_window,
    announce,
    ask_batch,
    ask_slot,
    claim_batch,
    claim_slot,
    code_of,
    join,
    make_run,
    nack,
    open_ring,
    opened,
    put,
    redo,
    release,
    rewind,
    signal,
)
from xtoken_core.queue.run.slots import SlotState
from xtoken_core.queue.sample import Status
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m


def test_no_slot_before_the_ring_is_opened() -> None:
    run = make_run()
    put(run)
    ring = announce(run)
    assert ask_slot(run, ring, [0, 1]) is None
    opened(run, ring)
    claim_slot(run, ring, [0, 1])


def test_late_teacher_gets_already_done() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0, 1])
    assert ask_slot(run, ring, [0, 1]) == m.AlreadyDone()
    claim_batch(run, [0, 1])
    release(run, ring.id, 0, 1)
    ack_window(run)
    assert ask_slot(run, ring, [0, 1]) == m.AlreadyDone()


def test_a_full_slot_is_withdrawn_with_its_teacher() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0, 1])
    run.sessions.end(TEACHER, "silence")
    sample = run.samples.samples[0]
    assert sample.status == {"teacher_0": Status.READY, "train": Status.WAITING}
    assert not run.rings.by_pair
    again = open_ring(run, join(run, "teacher", 2))
    signal(run, again, [0, 1])
    claim_batch(run, [0, 1])


@pytest.mark.parametrize("released", [True, False])
def test_lost_teacher_before_release_means_redo(released: bool) -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0, 1])
    claim_batch(run, [0, 1])
    if released:
        release(run, ring.id, 0, 1)
    run.sessions.end(TEACHER, "silence")
    assert redo(run) is not released
    release(run, ring.id, 0, 1)


def test_repeated_claim_after_withdrawal_has_no_slot() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0, 1])
    lease = claim_batch(run, [0, 1]).lease
    run.sessions.end(TEACHER, "silence")
    again = claim_batch(run, [0, 1])
    assert (again.lease, again.slots) == (lease, [])
    assert redo(run)


def test_different_plans_conflict() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0, 1])
    with pytest.raises(QueueError, match="planned the window differently") as caught:
        ask_batch(run, [1, 0])
    assert code_of(caught) == "conflict"


def test_trainer_nack_means_redo() -> None:
    run = make_run(max_attempts=2)
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0, 1])
    nack(run, TRAINER, claim_batch(run, [0, 1]).lease, [0], "not finite")
    assert not run.samples.dead
    release(run, ring.id, 0, 1)
    assert redo(run)
    rewind(run)
    assert not redo(run)
    signal(run, ring, [0, 1])
    claim_batch(run, [0, 1])


def test_full_slot_of_dead_samples_is_freed() -> None:
    run = make_run(teachers=2)
    second = join(run, "teacher", name="second")
    put(run)
    first, other = open_ring(run), open_ring(run, second, teacher=1)
    signal(run, first, [0])
    claim = claim_slot(run, other, [0])
    nack(run, second, claim.lease, [0], "no text")
    assert [first.slots[0].state, other.slots[0].state] == [SlotState.FREE, SlotState.FREE]
    claim_batch(run, [0])
    assert not run.samples.leases
    assert not run.slots.readings


def test_ring_needs_an_admitted_trainer() -> None:
    run = make_run()
    newer = join(run, "trainer", 2)
    with pytest.raises(QueueError, match="is another one by now") as caught:
        announce(run, trainer=newer)
    assert code_of(caught) == "ring_closed"
    rewind(run, newer)
    open_ring(run, trainer=newer)


@pytest.mark.parametrize(("teacher", "rank"), [(1, 0), (0, 1)], ids=["teacher", "rank"])
def test_ring_of_an_unknown_pair_is_refused(teacher: int, rank: int) -> None:
    with pytest.raises(QueueError, match="the run has 1 teachers and 1 ranks"):
        announce(make_run(), TEACHER, teacher, rank)


def test_only_the_two_sides_of_a_ring_use_it() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    stranger = join(run, "teacher", name="stranger")
    with pytest.raises(QueueError, match="belongs to another teacher"):
        ask_slot(run, ring, [0, 1], stranger)
    with pytest.raises(QueueError, match="belongs to another trainer"):
        opened(run, ring, stranger)
