"""The protocol of a run, call by call: what the model explores as a whole, and the refusals that it never meets.

Slots, signals and rings of a run, call by call.
"""

import pytest

from tests.unit.queue.run_calls import (
    COLLATOR,
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
    lease_block,
    leased,
    make_run,
    nack,
    open_ring,
    opened,
    put,
    put_block,
    redo,
    release,
    rewind,
    rows,
    signal,
)
from tests.unit.queue.world import ask
from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.run.slots import SlotState
from xtoken_core.queue.run.state import run_tasks
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m


def test_training_needs_the_row_and_every_signal() -> None:
    tasks = {task.name: task.requires for task in run_tasks(2)}
    assert tasks["teacher_0"] == tasks["teacher_1"] == {"input_ids"}
    assert tasks["train"] == {"input_ids", "teacher_0_full_logits_ipc", "teacher_1_full_logits_ipc"}


@pytest.mark.parametrize("wrong", [{"block_size": 3}, {"span": 5}], ids=["block", "span"])
def test_sizes_that_could_deadlock_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(QueueError, match="block_size must divide samples_per_step, and span be at least 3 steps"):
        make_run(**wrong)


def test_a_refused_block_keeps_its_places() -> None:
    run = make_run()
    nack(run, COLLATOR, leased(run).lease, [], "unreadable")
    assert rows(run, 0) == []
    assert not redo(run, [0, 1])
    assert ack_window(run) == []
    assert (run.cursor, run.finished.first_gap()) == (1, 2)


def test_unclaimed_rows_block_the_ack_of_a_step() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0])
    claim_batch(run, [0])
    with pytest.raises(QueueError, match="1 of its samples are not leased") as caught:
        ack_window(run)
    assert code_of(caught) == "conflict"


def test_rewind_ends_older_trainers_and_keeps_its_window() -> None:
    run = make_run(positions=20, ranks=2)
    other_rank = join(run, "trainer", rank=1, name="trainer-1")
    put(run, blocks=3)
    newer = join(run, "trainer", 2)
    assert rewind(run, newer, 1, {0: "empty"}, {1: "bad"}) == [0, 1]
    assert other_rank not in run.sessions.live
    assert (run.cursor, sorted(run.samples.samples)) == (1, [2, 3, 4, 5])
    assert (run.skipped, run.samples.dead) == ({0: "empty"}, {1: "bad"})
    assert run.trainer_of(0) is run.sessions.get(newer)
    assert run.trainer_of(1) is None


def test_rewind_reopens_done_blocks() -> None:
    run = make_run()
    put(run, blocks=2)
    signal(run, open_ring(run), [0, 1])
    claim_batch(run, [0, 1])
    ack_window(run)
    rewind(run)
    assert rows(run, 0) is None
    assert leased(run).first == 0
    assert lease_block(run) is None


def test_a_tombstone_of_a_reopened_block_gives_way_to_a_row() -> None:
    run = make_run(teachers=0)
    put_block(run, leased(run).lease, [0], {1: "the store lacks it"})
    put_block(run, leased(run).lease, [3], {2: "empty"})
    claim_batch(run, [0])
    ack_window(run)
    rewind(run)
    assert (run.skipped, run.finished.first_gap(1)) == ({2: "empty"}, 1)
    put_block(run, leased(run).lease, [0, 1])
    assert rows(run, 0) == [0, 1]
    claim_batch(run, [0, 1])
    ack_window(run)
    assert run.skipped == {2: "empty"}


def test_window_beyond_the_end_waits_for_the_end() -> None:
    run = make_run()
    assert rows(run, 2) is None


def test_give_up_keeps_the_first_reason() -> None:
    run = make_run()
    for reason in ("the disk is full", "something else"):
        run.give_up(ask(m.Giveup, COLLATOR, reason=reason))
    with pytest.raises(QueueError, match="the disk is full"):
        lease_block(run)


@pytest.mark.parametrize("call", ["announce", "claim", "ack", "rewind"])
def test_roles_are_checked(call: str) -> None:
    run = make_run()
    with pytest.raises(QueueError, match="only a") as caught:
        if call == "announce":
            announce(run, TRAINER)
        elif call == "claim":
            ask_batch(run, [0], TEACHER)
        elif call == "ack":
            ack_window(run, session=TEACHER)
        else:
            rewind(run, COLLATOR)
    assert code_of(caught) == "forbidden"


def prompts_run(**changes: int) -> RunProtocol:
    """Three steps of a text and a prompt, with weights of step 0 published."""
    run = make_run(**{"positions": 6, "block_size": 1, "prompts": 1, "teachers": 0, **changes})
    join(run, "rollout")
    publish(run, 0)
    return run


def publish(run: RunProtocol, step: int, tag: int = 5) -> None:
    run.publish(ask(m.Publish, TRAINER, step=step, rewinds=run.rewinds, tag=tag))


def lease_prompts(run: RunProtocol) -> m.Block | None:
    return run.lease_block(ask(m.LeaseBlock, "rollout/1"))


def test_prompts_are_leased_to_rollout_workers_up_to_the_staleness_of_their_weights() -> None:
    run = prompts_run(max_staleness=1)
    blocks = [lease_prompts(run) for _ in range(3)]
    assert [block and (block.first, block.version, block.tag) for block in blocks] == [(1, 0, 5), (3, 0, 5), None]
    assert [leased(run).first for _ in range(3)] == [0, 2, 4]


def test_a_cold_start_has_no_prompt_and_the_steps_behind_it_more_and_more() -> None:
    run = prompts_run(max_staleness=2, after=1, last_prompts=2)
    blocks = [lease_prompts(run) for _ in range(4)]
    assert [block and block.first for block in blocks] == [3, 4, 5, None]
    assert [leased(run).first for _ in range(3)] == [0, 1, 2]


def test_before_weights_are_published_no_prompt_is_leased() -> None:
    run = prompts_run()
    rewind(run)
    assert lease_prompts(run) is None
    with pytest.raises(QueueError, match="weights of step 1 are published, the run is at 0"):
        publish(run, 1)
    publish(run, 0)
    assert lease_prompts(run) is not None


def test_a_rewind_drops_completions_and_keeps_text() -> None:
    run = prompts_run(max_staleness=2)
    for session, lease in (
        ("rollout/1", lease_prompts(run)),
        ("rollout/1", lease_prompts(run)),
        (COLLATOR, leased(run)),
    ):
        tombstones = {3: "no valid text"} if lease.first == 3 else {}
        ids = [] if tombstones else [lease.first]
        run.put_block(ask(m.Put, session, ids=ids, columns=[], lease=lease.lease, tombstones=tombstones), ["input_ids"])
    assert rewind(run) == [1]
    assert (list(run.samples.samples), dict(run.skipped)) == ([0], {})
    publish(run, 0, tag=6)
    block = lease_prompts(run)
    assert (block.first, block.tag) == (1, 6)


def test_a_run_without_prompts_publishes_no_weights() -> None:
    run = make_run()
    with pytest.raises(QueueError, match="the run has no prompts"):
        publish(run, 0)


def test_prompts_that_are_no_whole_blocks_are_refused() -> None:
    half, none = {"prompts": 2, "last_prompts": 1}, {"prompts": 0, "last_prompts": 2}
    for wrong in ({"prompts": 1}, {"prompts": 4}, {"prompts": 2, "groups": 2, "block_size": 1}, half, none):
        with pytest.raises(QueueError, match="must be whole blocks"):
            make_run(**wrong)


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


def test_a_slot_that_does_not_exist_is_named() -> None:
    run = make_run()
    with pytest.raises(QueueError, match="has 1 slots, none is number 1"):
        release(run, open_ring(run).id, 1, 0)
