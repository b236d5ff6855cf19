"""Calls of a run with one teacher, trainer and collator, for the tests of its protocol."""

import pytest

from tests.unit.queue.world import ask
from xtoken_core import schema
from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.run.slots import RegisteredRing
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
