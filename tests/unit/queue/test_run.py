"""The protocol of a run, call by call: what the model explores as a whole, and the refusals that it never meets."""

import pytest

from xtoken_core import schema
from xtoken_core.queue.run.protocol import RunProtocol, SlotClaim, run_tasks
from xtoken_core.queue.run.rings import Ring, SlotState
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.queue.tasks.samples import Lease, Status
from xtoken_core.wire import QueueError

ROW = [schema.INPUT_IDS.name]
TEACHER, TRAINER, COLLATOR = "teacher/1", "trainer/1", "collator/1"


def join(run: RunProtocol, role: str, incarnation: int = 1, rank: int = 0, name: str = "") -> str:
    session = f"{name or role}/{incarnation}"
    run.sessions.open(Session(session, name or role, role, incarnation, rank, 1.0, 0.0))
    return session


def make_run(**changes: int) -> RunProtocol:
    """Four positions in two steps, one teacher with one slot, everybody connected, rewound to step 0."""
    sizes = {"positions": 4, "samples_per_step": 2, "block_size": 2, "span": 6, "teachers": 1, "ranks": 1, "slots": 1}
    run = RunProtocol(Sessions(), **{**sizes, "max_attempts": 1, "max_dead": 4, **changes})
    for role in ("collator", "teacher", "trainer"):
        join(run, role)
    run.rewind(TRAINER, 0, {}, {})
    return run


def put(run: RunProtocol, blocks: int = 1) -> None:
    for _ in range(blocks):
        lease = run.lease_block(COLLATOR)
        assert lease is not None
        run.put_block(COLLATOR, lease.id, list(range(*run.source.bounds(lease.block))), {}, ROW)


def open_ring(run: RunProtocol, teacher: str = TEACHER, trainer: str = TRAINER, number: int = 0) -> Ring:
    ring = run.announce_ring(teacher, number, 0, trainer, b"")
    run.opened(trainer, ring.id)
    return ring


def claim_slot(run: RunProtocol, ring: Ring, ids: list[int]) -> SlotClaim:
    claim = run.claim_slot(ring.teacher_session, ring.id, ids, run.rewinds)
    assert isinstance(claim, SlotClaim)
    return claim


def signal(run: RunProtocol, ring: Ring, ids: list[int]) -> SlotClaim:
    claim = claim_slot(run, ring, ids)
    run.publish(ring.teacher_session, claim.lease)
    return claim


def claim_batch(run: RunProtocol, ids: list[int]) -> Lease:
    found = run.claim_batch(TRAINER, ids, run.rewinds)
    assert found is not None
    return found[0]


def code_of(caught: pytest.ExceptionInfo[QueueError]) -> str:
    return caught.value.code


def test_training_needs_the_row_and_every_signal() -> None:
    tasks = {task.name: task.requires for task in run_tasks(2)}
    assert tasks["teacher_0"] == tasks["teacher_1"] == {"input_ids"}
    assert tasks["train"] == {"input_ids", "teacher_0_full_logits_ipc", "teacher_1_full_logits_ipc"}


@pytest.mark.parametrize("wrong", [{"block_size": 3}, {"span": 5}], ids=["block", "span"])
def test_sizes_that_could_deadlock_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(QueueError, match="block_size must divide samples_per_step, and span be at least 3 steps"):
        make_run(**wrong)


def test_a_step_from_rows_to_acknowledgement() -> None:
    run = make_run()
    assert run.window_ready(0, run.rewinds) is None
    put(run)
    assert run.window_ready(0, run.rewinds) == [0, 1]
    ring = open_ring(run)
    assert run.claim_batch(TRAINER, [0, 1], run.rewinds) is None
    signal(run, ring, [0, 1])
    found = run.claim_batch(TRAINER, [0, 1], run.rewinds)
    assert found is not None
    lease, (ref,) = found
    assert (lease.ids, ref.ring, ref.slot, ref.generation, ref.rows) == ((0, 1), ring.id, 0, 1, {0: 0, 1: 1})
    assert run.release(TRAINER, ref.ring, ref.slot, ref.generation)
    assert not run.release(TRAINER, ref.ring, ref.slot, ref.generation)
    assert not run.check_step(TRAINER, 0, run.rewinds, [])
    assert run.ack_window(TRAINER, 0, run.rewinds) == [0, 1]
    assert run.ack_window(TRAINER, 0, run.rewinds) == []
    assert (run.cursor, run.finished.first_gap(), run.table.readings) == (1, 2, {})


def test_a_claim_of_a_slot_that_is_repeated_is_the_same() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    assert claim_slot(run, ring, [0, 1]) == claim_slot(run, ring, [0, 1])


def test_a_slot_is_not_filled_before_the_trainer_has_opened_the_ring() -> None:
    run = make_run()
    put(run)
    ring = run.announce_ring(TEACHER, 0, 0, TRAINER, b"")
    assert run.claim_slot(TEACHER, ring.id, [0, 1], run.rewinds) is None
    run.opened(TRAINER, ring.id)
    claim_slot(run, ring, [0, 1])


def test_a_teacher_waits_for_a_free_slot() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0])
    assert run.claim_slot(TEACHER, ring.id, [1], run.rewinds) is None
    claim_batch(run, [0])
    assert run.claim_slot(TEACHER, ring.id, [1], run.rewinds) is None
    run.release(TRAINER, ring.id, 0, 1)
    assert claim_slot(run, ring, [1]).generation == 2


def test_a_teacher_that_comes_late_to_a_window_learns_that_it_is_done() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0, 1])
    assert run.claim_slot(TEACHER, ring.id, [0, 1], run.rewinds) == Status.DONE
    claim_batch(run, [0, 1])
    run.release(TRAINER, ring.id, 0, 1)
    run.ack_window(TRAINER, 0, run.rewinds)
    assert run.claim_slot(TEACHER, ring.id, [0, 1], run.rewinds) == Status.DONE


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
def test_a_step_is_done_again_if_its_teacher_goes_before_the_release(released: bool) -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0, 1])
    claim_batch(run, [0, 1])
    if released:
        run.release(TRAINER, ring.id, 0, 1)
    run.sessions.end(TEACHER, "silence")
    assert run.check_step(TRAINER, 0, run.rewinds, []) is not released
    assert run.release(TRAINER, ring.id, 0, 1) is False


def test_a_claim_repeated_after_its_signal_was_withdrawn_names_no_place() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0, 1])
    lease = claim_batch(run, [0, 1])
    run.sessions.end(TEACHER, "silence")
    assert run.claim_batch(TRAINER, [0, 1], run.rewinds) == (lease, [])
    assert run.check_step(TRAINER, 0, run.rewinds, [])


def test_a_trainer_that_plans_otherwise_than_its_teacher_is_told() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0, 1])
    with pytest.raises(QueueError, match="planned the window differently") as caught:
        run.claim_batch(TRAINER, [1, 0], run.rewinds)
    assert code_of(caught) == "conflict"


def test_a_refused_sample_dies_and_its_step_is_done_again_without_it() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    claim = claim_slot(run, ring, [0, 1])
    assert run.refuse(TEACHER, claim.lease, [0], "no text") == [0]
    assert ring.slots[0].state == SlotState.FREE
    assert run.check_step(TRAINER, 0, run.rewinds, [])
    assert not run.check_step(TRAINER, 0, run.rewinds, [0])
    assert signal(run, ring, [0, 1]).ids == (1,)
    assert claim_batch(run, [0, 1]).ids == (1,)


def test_a_trainers_refusal_makes_the_step_be_done_again() -> None:
    run = make_run(max_attempts=2)
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0, 1])
    lease = claim_batch(run, [0, 1])
    assert run.refuse(TRAINER, lease.id, [0], "not finite") == []
    run.release(TRAINER, ring.id, 0, 1)
    assert run.check_step(TRAINER, 0, run.rewinds, [])
    run.rewind(TRAINER, 0, {}, {})
    assert not run.check_step(TRAINER, 0, run.rewinds, [])
    signal(run, ring, [0, 1])
    claim_batch(run, [0, 1])


def test_a_full_slot_whose_samples_have_all_died_is_free() -> None:
    run = make_run(teachers=2)
    second = join(run, "teacher", name="second")
    put(run)
    first, other = open_ring(run), open_ring(run, second, number=1)
    signal(run, first, [0])
    claim = claim_slot(run, other, [0])
    run.refuse(second, claim.lease, [0], "no text")
    assert [first.slots[0].state, other.slots[0].state] == [SlotState.FREE, SlotState.FREE]
    assert run.claim_batch(TRAINER, [0], run.rewinds) is not None
    assert not run.samples.leases
    assert not run.table.readings


def test_too_many_dead_end_the_run_for_everybody() -> None:
    run = make_run(max_dead=0)
    lease = run.lease_block(COLLATOR)
    assert lease is not None
    run.refuse_block(COLLATOR, lease.id, "unreadable")
    with pytest.raises(QueueError, match="2 dead letters, 0 are allowed: 0, 1: unreadable") as caught:
        run.window_ready(0, run.rewinds)
    assert code_of(caught) == "run_failed"


def test_a_refused_block_keeps_its_places() -> None:
    run = make_run()
    lease = run.lease_block(COLLATOR)
    assert lease is not None
    run.refuse_block(COLLATOR, lease.id, "unreadable")
    assert run.window_ready(0, run.rewinds) == []
    assert not run.check_step(TRAINER, 0, run.rewinds, [0, 1])
    assert run.ack_window(TRAINER, 0, run.rewinds) == []
    assert run.cursor == 1


@pytest.mark.parametrize(
    ("ids", "tombstones"),
    [([0], {}), ([0, 1], {1: "empty"}), ([0, 1, 2], {}), ([0, 2], {})],
    ids=["missing", "doubled", "too-many", "foreign"],
)
def test_a_block_is_put_whole(ids: list[int], tombstones: dict[int, str]) -> None:
    run = make_run()
    lease = run.lease_block(COLLATOR)
    assert lease is not None
    with pytest.raises(QueueError, match="a row or a tombstone for each position of block 0"):
        run.put_block(COLLATOR, lease.id, ids, tombstones, ROW)


def test_rows_need_their_tokens() -> None:
    run = make_run()
    lease = run.lease_block(COLLATOR)
    assert lease is not None
    with pytest.raises(QueueError, match="need the column 'input_ids'"):
        run.put_block(COLLATOR, lease.id, [0, 1], {}, ["sample_mask"])


def test_the_span_moves_with_the_lowest_position_that_is_not_done() -> None:
    run = make_run(positions=20)
    put(run, blocks=3)
    assert run.lease_block(COLLATOR) is None
    signal(run, open_ring(run), [0, 1])
    claim_batch(run, [0, 1])
    run.ack_window(TRAINER, 0, run.rewinds)
    block = run.lease_block(COLLATOR)
    assert block is not None
    assert run.source.bounds(block.block) == (6, 8)


def test_a_step_cannot_be_acknowledged_before_all_of_it_was_claimed() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0])
    claim_batch(run, [0])
    with pytest.raises(QueueError, match="1 of its samples are not leased") as caught:
        run.ack_window(TRAINER, 0, run.rewinds)
    assert code_of(caught) == "conflict"


def test_requests_from_before_a_rewind_are_sent_back_to_its_step() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    before = run.rewinds
    claim = claim_slot(run, ring, [0, 1])
    run.rewind(TRAINER, 0, {}, {})
    with pytest.raises(QueueError, match="rewound to step 0") as caught:
        run.claim_slot(TEACHER, ring.id, [0, 1], before)
    assert caught.value.detail == {"step": 0, "rewinds": before + 1}
    with pytest.raises(QueueError) as caught:
        run.publish(TEACHER, claim.lease)
    assert code_of(caught) == "lease_revoked"
    assert claim_slot(run, ring, [0, 1]).generation == claim.generation + 1


def test_a_rewind_ends_older_trainers_and_keeps_the_rows_of_its_window() -> None:
    run = make_run(positions=20, ranks=2)
    other_rank = join(run, "trainer", rank=1, name="trainer-1")
    put(run, blocks=3)
    newer = join(run, "trainer", 2)
    assert run.rewind(newer, 1, {0: "empty"}, {1: "bad"}) == [0, 1]
    assert other_rank not in run.sessions.live
    assert (run.cursor, sorted(run.samples.samples)) == (1, [2, 3, 4, 5])
    assert (run.skipped, run.samples.dead) == ({0: "empty"}, {1: "bad"})
    assert run.trainer_of(0) is run.sessions.get(newer)
    assert run.trainer_of(1) is None


def test_a_rewind_behind_what_was_done_opens_its_blocks_again() -> None:
    run = make_run()
    put(run, blocks=2)
    signal(run, open_ring(run), [0, 1])
    claim_batch(run, [0, 1])
    run.ack_window(TRAINER, 0, run.rewinds)
    run.rewind(TRAINER, 0, {}, {})
    assert run.window_ready(0, run.rewinds) is None
    block = run.lease_block(COLLATOR)
    assert block is not None
    assert block.block == 0
    assert run.lease_block(COLLATOR) is None


def test_the_end_is_exhausted_for_who_asks_for_more() -> None:
    run = make_run()
    run.rewind(TRAINER, 2, {}, {})
    assert run.ended
    with pytest.raises(QueueError) as caught:
        run.lease_block(COLLATOR)
    assert code_of(caught) == "exhausted"
    with pytest.raises(QueueError) as caught:
        run.window_ready(2, run.rewinds)
    assert code_of(caught) == "exhausted"


def test_a_window_beyond_the_end_waits_until_the_end_is_sure() -> None:
    run = make_run()
    assert run.window_ready(2, run.rewinds) is None


def test_a_ring_is_for_a_trainer_that_is_in_place() -> None:
    run = make_run()
    newer = join(run, "trainer", 2)
    with pytest.raises(QueueError, match="is another one by now") as caught:
        run.announce_ring(TEACHER, 0, 0, newer, b"")
    assert code_of(caught) == "ring_closed"
    run.rewind(newer, 0, {}, {})
    open_ring(run, trainer=newer)


@pytest.mark.parametrize(("teacher", "rank"), [(1, 0), (0, 1)], ids=["teacher", "rank"])
def test_a_ring_of_nobody_is_refused(teacher: int, rank: int) -> None:
    with pytest.raises(QueueError, match="the run has 1 teachers and 1 ranks"):
        make_run().announce_ring(TEACHER, teacher, rank, TRAINER, b"")


def test_only_the_two_sides_of_a_ring_use_it() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    stranger = join(run, "teacher", name="stranger")
    with pytest.raises(QueueError, match="belongs to another teacher"):
        run.claim_slot(stranger, ring.id, [0, 1], run.rewinds)
    with pytest.raises(QueueError, match="belongs to another trainer"):
        run.opened(stranger, ring.id)


@pytest.mark.parametrize("call", ["announce", "claim", "ack", "rewind"])
def test_roles_are_checked(call: str) -> None:
    run = make_run()
    with pytest.raises(QueueError, match="only a") as caught:
        if call == "announce":
            run.announce_ring(TRAINER, 0, 0, TRAINER, b"")
        elif call == "claim":
            run.claim_batch(TEACHER, [0], run.rewinds)
        elif call == "ack":
            run.ack_window(TEACHER, 0, run.rewinds)
        else:
            run.rewind(COLLATOR, 0, {}, {})
    assert code_of(caught) == "forbidden"


def test_a_run_that_was_given_up_says_so_and_keeps_the_first_reason() -> None:
    run = make_run()
    run.give_up("the disk is full")
    run.give_up("something else")
    with pytest.raises(QueueError, match="the disk is full"):
        run.lease_block(COLLATOR)
