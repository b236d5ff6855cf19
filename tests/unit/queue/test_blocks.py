"""Blocks in order, inside the span, and back after a rewind."""

import pytest

from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.run.state import Blocks
from xtoken_core.wire import QueueError


def leased(blocks: Blocks, floor: int) -> list[int]:
    """Every block that can be leased one after the other."""
    free = []
    while (block := blocks.lowest_free(floor)) is not None:
        blocks.lease(100 + block, "c", block)
        free.append(block)
    return free


def filled(*positions: int) -> IntervalSet:
    out = IntervalSet()
    for position in positions:
        out.add(position)
    return out


@pytest.mark.parametrize(
    ("floor", "expected"),
    [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [1, 2, 3]), (8, [4, 5])],
    ids=["start", "inside-a-block", "next-block", "short-last-block"],
)
def test_blocks_end_inside_the_span(floor: int, expected: list[int]) -> None:
    blocks = Blocks(positions=11, block_size=2, span=6)
    blocks.done.add(0, floor // 2)
    assert leased(blocks, floor) == expected


def test_the_last_block_may_be_short() -> None:
    blocks = Blocks(positions=5, block_size=2, span=6)
    assert [blocks.bounds(block) for block in (0, 1, 2)] == [(0, 2), (2, 4), (4, 5)]


def test_a_block_is_lent_once_until_its_session_ends() -> None:
    blocks = Blocks(positions=4, block_size=2, span=4)
    blocks.lease(1, "a", 0)
    assert blocks.lowest_free(0) == 1
    blocks.lease(2, "b", 1)
    assert blocks.lowest_free(0) is None
    blocks.end_session("a")
    assert blocks.lowest_free(0) == 0
    assert blocks.held(2, "b").block == 1


@pytest.mark.parametrize("session", ["b", ""])
def test_a_lease_is_held_by_its_session_only(session: str) -> None:
    blocks = Blocks(positions=4, block_size=2, span=4)
    blocks.lease(1, "a", 0)
    with pytest.raises(QueueError, match="was revoked") as caught:
        blocks.held(1, session)
    assert caught.value.code == "lease_revoked"


def test_a_restart_opens_every_block_that_is_not_full() -> None:
    blocks = Blocks(positions=10, block_size=2, span=10)
    blocks.done.add(0, 5)
    blocks.lease(1, "a", 4)
    blocks.restart(2, filled(2, 3, 4, 8, 9))
    assert leased(blocks, 2) == [2, 3]


def test_restart_at_the_end_leaves_no_block() -> None:
    blocks = Blocks(positions=4, block_size=2, span=4)
    blocks.restart(4, IntervalSet())
    assert blocks.lowest_free(4) is None


def test_refusals_are_forgotten_once_their_block_is_done() -> None:
    blocks = Blocks(positions=10, block_size=2, span=10)
    for block in (0, 1, 2, 3):
        assert blocks.count_refusals(block, 2) == 2
    blocks.finish_below(2)
    blocks.finish(1)
    assert blocks.refused == {2: 2, 3: 2}
    blocks.restart(0, filled(4, 5))
    assert blocks.refused == {3: 2}
    assert blocks.count_refusals(0, 1) == 1


def test_a_step_that_is_done_revokes_the_leases_of_its_blocks() -> None:
    blocks = Blocks(positions=10, block_size=2, span=10)
    blocks.lease(1, "a", 0)
    blocks.lease(2, "a", 1)
    blocks.finish_below(2)
    assert list(blocks.leases) == [2]
