"""The protocol of a run, call by call: what the model explores as a whole, and the refusals that it never meets."""

import pytest

from tests.unit.queue.world import ask
from xtoken_core import schema
from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.run.slots import RegisteredRing, SlotState
from xtoken_core.queue.run.state import run_tasks
from xtoken_core.queue.sample import Status
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m

ROW = [schema.INPUT_IDS.name]
TEACHER, TRAINER, COLLATOR = "teacher/1", "trainer/1", "collator/1"


def join(run: RunProtocol, role: str, incarnation: int = 1, rank: int = 0, name: str = "") -> str:
    session = f"{name or role}/{incarnation}"
    run.sessions.open(Session(session, name or role, role, incarnation, rank, 1.0, 0.0))
    return session


def make_run(max_attempts: int = 1, **changes: int) -> RunProtocol:
    """Four positions in two steps, one teacher with one slot, everybody connected, rewound to step 0."""
    sizes = {"positions": 4, "samples_per_step": 2, "block_size": 2, "span": 6, "teachers": 1, "ranks": 1, "slots": 1}
    definition = m.RunDef(**{**sizes, "max_dead": 4, **changes}, document=b"")
    run = RunProtocol(Sessions(), definition, max_attempts=max_attempts)
    for role in ("collator", "teacher", "trainer"):
        join(run, role)
    rewind(run)
    return run


def rewind(
    run: RunProtocol,
    session: str = TRAINER,
    step: int = 0,
    skipped: dict[int, str] | None = None,
    dead: dict[int, str] | None = None,
) -> list[int]:
    return run.rewind(ask(m.Rewind, session, step=step, skipped=skipped or {}, dead=dead or {}))


def lease_block(run: RunProtocol) -> m.Block | None:
    return run.lease_block(ask(m.LeaseBlock, COLLATOR))


def leased(run: RunProtocol) -> m.Block:
    block = lease_block(run)
    assert block is not None
    return block


def put_block(
    run: RunProtocol, lease: int, ids: list[int], tombstones: dict[int, str] | None = None, fields: list[str] = ROW
) -> list[int]:
    return run.put_block(ask(m.Put, COLLATOR, ids=ids, columns=[], lease=lease, tombstones=tombstones or {}), fields)


def put(run: RunProtocol, blocks: int = 1) -> None:
    for _ in range(blocks):
        block = leased(run)
        put_block(run, block.lease, list(range(block.first, block.first + block.count)))


def nack(run: RunProtocol, session: str, lease: int, ids: list[int], reason: str) -> None:
    run.nack(ask(m.Nack, session, lease=lease, ids=ids, reason=reason))


def rows(run: RunProtocol, step: int) -> list[int] | None:
    """The step's positions that have a row, once its window is complete."""
    window = run.read_window(ask(m.Window, TRAINER, step=step, rewinds=run.rewinds, fields=[]))
    assert not isinstance(window, m.AlreadyDone)
    return None if window is None else window.ids


def announce(
    run: RunProtocol, session: str = TEACHER, teacher: int = 0, rank: int = 0, trainer: str = TRAINER
) -> RegisteredRing:
    named = run.sessions.get(trainer).public_id
    request = ask(m.AnnounceRing, session, teacher=teacher, rank=rank, trainer=named, handle=b"")
    return run.rings.get(run.announce_ring(request).ring)


def opened(run: RunProtocol, ring: RegisteredRing, session: str = TRAINER) -> None:
    run.confirm_ring(ask(m.OpenedRing, session, teacher=0, ring=ring.id))


def open_ring(run: RunProtocol, session: str = TEACHER, trainer: str = TRAINER, teacher: int = 0) -> RegisteredRing:
    ring = announce(run, session, teacher, trainer=trainer)
    opened(run, ring, trainer)
    return ring


def ask_slot(
    run: RunProtocol, ring: RegisteredRing, ids: list[int], session: str = "", rewinds: int | None = None
) -> m.Claimed | m.AlreadyDone | None:
    rewinds = run.rewinds if rewinds is None else rewinds
    return run.claim_slot(ask(m.ClaimSlot, session or ring.teacher_session, ring=ring.id, ids=ids, rewinds=rewinds))


def claim_slot(run: RunProtocol, ring: RegisteredRing, ids: list[int]) -> m.Claimed:
    claim = ask_slot(run, ring, ids)
    assert isinstance(claim, m.Claimed)
    return claim


def complete(run: RunProtocol, session: str, lease: int) -> None:
    run.complete(ask(m.Complete, session, lease=lease))


def signal(run: RunProtocol, ring: RegisteredRing, ids: list[int]) -> m.Claimed:
    claim = claim_slot(run, ring, ids)
    complete(run, ring.teacher_session, claim.lease)
    return claim


def ask_batch(run: RunProtocol, ids: list[int], session: str = TRAINER) -> m.Claimed | None:
    return run.claim_batch(ask(m.ClaimBatch, session, ids=ids, rewinds=run.rewinds))


def claim_batch(run: RunProtocol, ids: list[int]) -> m.Claimed:
    claim = ask_batch(run, ids)
    assert claim is not None
    return claim


def release(run: RunProtocol, ring: int, slot: int, generation: int) -> None:
    run.release(ask(m.Release, TRAINER, ring=ring, slot=slot, generation=generation))


def redo(run: RunProtocol, dead: list[int] | None = None, step: int = 0) -> bool:
    return run.check_step(ask(m.CheckStep, TRAINER, step=step, rewinds=run.rewinds, dead=dead or [])).redo


def ack_window(run: RunProtocol, step: int = 0, session: str = TRAINER) -> list[int]:
    return run.ack_window(ask(m.AckWindow, session, step=step, rewinds=run.rewinds))


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
    assert rows(run, 0) is None
    put(run)
    assert rows(run, 0) == [0, 1]
    ring = open_ring(run)
    assert ask_batch(run, [0, 1]) is None
    signal(run, ring, [0, 1])
    claim = claim_batch(run, [0, 1])
    assert (claim.ids, claim.slots) == ([0, 1], [m.SlotRef(teacher=0, ring=ring.id, slot=0, generation=1)])
    assert ring.slots[0].state == SlotState.READING
    for _ in range(2):
        release(run, ring.id, 0, 1)
        assert ring.slots[0].state == SlotState.FREE
    assert not redo(run)
    assert ack_window(run) == [0, 1]
    assert ack_window(run) == []
    assert (run.cursor, run.finished.first_gap(), run.slots.readings) == (1, 2, {})


def test_repeated_claim_of_a_slot() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    assert claim_slot(run, ring, [0, 1]) == claim_slot(run, ring, [0, 1])


def test_no_slot_before_the_ring_is_opened() -> None:
    run = make_run()
    put(run)
    ring = announce(run)
    assert ask_slot(run, ring, [0, 1]) is None
    opened(run, ring)
    claim_slot(run, ring, [0, 1])


def test_a_teacher_waits_for_a_free_slot() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    signal(run, ring, [0])
    assert ask_slot(run, ring, [1]) is None
    claim_batch(run, [0])
    assert ask_slot(run, ring, [1]) is None
    release(run, ring.id, 0, 1)
    assert claim_slot(run, ring, [1]).generation == 2


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


def test_dead_sample_means_redo_without_it() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    claim = claim_slot(run, ring, [0, 1])
    nack(run, TEACHER, claim.lease, [0], "no text")
    assert run.samples.dead == {0: "no text"}
    assert ring.slots[0].state == SlotState.FREE
    assert redo(run)
    assert not redo(run, [0])
    assert signal(run, ring, [0, 1]).dead == [0]
    assert claim_batch(run, [0, 1]).dead == [0]


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


def test_too_many_dead_fail_the_run() -> None:
    run = make_run(max_dead=0)
    nack(run, COLLATOR, leased(run).lease, [], "unreadable")
    with pytest.raises(QueueError, match="2 dead letters, 0 are allowed: 0, 1: unreadable") as caught:
        rows(run, 0)
    assert code_of(caught) == "run_failed"


def test_a_refused_block_keeps_its_places() -> None:
    run = make_run()
    nack(run, COLLATOR, leased(run).lease, [], "unreadable")
    assert rows(run, 0) == []
    assert not redo(run, [0, 1])
    assert ack_window(run) == []
    assert run.cursor == 1


@pytest.mark.parametrize(
    ("ids", "tombstones"),
    [([0], {}), ([0, 1], {1: "empty"}), ([0, 1, 2], {}), ([0, 2], {})],
    ids=["missing", "doubled", "too-many", "foreign"],
)
def test_a_block_is_put_whole(ids: list[int], tombstones: dict[int, str]) -> None:
    run = make_run()
    lease = leased(run).lease
    with pytest.raises(QueueError, match="a row or a tombstone for each position of block 0"):
        put_block(run, lease, ids, tombstones)


def test_rows_need_their_tokens() -> None:
    run = make_run()
    lease = leased(run).lease
    with pytest.raises(QueueError, match="need the column 'input_ids'"):
        put_block(run, lease, [0, 1], fields=["sample_mask"])


def test_span_follows_the_lowest_open_position() -> None:
    run = make_run(positions=20)
    put(run, blocks=3)
    assert lease_block(run) is None
    signal(run, open_ring(run), [0, 1])
    claim_batch(run, [0, 1])
    ack_window(run)
    block = leased(run)
    assert (block.first, block.count) == (6, 2)


def test_unclaimed_rows_block_the_ack_of_a_step() -> None:
    run = make_run()
    put(run)
    signal(run, open_ring(run), [0])
    claim_batch(run, [0])
    with pytest.raises(QueueError, match="1 of its samples are not leased") as caught:
        ack_window(run)
    assert code_of(caught) == "conflict"


def test_requests_from_before_a_rewind_get_rewound() -> None:
    run = make_run()
    put(run)
    ring = open_ring(run)
    before = run.rewinds
    claim = claim_slot(run, ring, [0, 1])
    rewind(run)
    with pytest.raises(QueueError, match="rewound to step 0") as caught:
        ask_slot(run, ring, [0, 1], rewinds=before)
    assert caught.value.detail == {"step": 0, "rewinds": before + 1}
    with pytest.raises(QueueError) as caught:
        complete(run, TEACHER, claim.lease)
    assert code_of(caught) == "lease_revoked"
    assert claim_slot(run, ring, [0, 1]).generation == claim.generation + 1


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


def test_calls_beyond_the_end_are_exhausted() -> None:
    run = make_run()
    rewind(run, step=2)
    assert run.ended
    with pytest.raises(QueueError) as caught:
        lease_block(run)
    assert code_of(caught) == "exhausted"
    with pytest.raises(QueueError) as caught:
        rows(run, 2)
    assert code_of(caught) == "exhausted"


def test_window_beyond_the_end_waits_for_the_end() -> None:
    run = make_run()
    assert rows(run, 2) is None


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


def test_give_up_keeps_the_first_reason() -> None:
    run = make_run()
    for reason in ("the disk is full", "something else"):
        run.give_up(ask(m.Giveup, COLLATOR, reason=reason))
    with pytest.raises(QueueError, match="the disk is full"):
        lease_block(run)
