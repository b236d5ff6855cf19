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


@pytest.mark.parametrize("session", ["b", ""])
def test_a_lease_is_held_by_its_session_only(session: str) -> None:
    blocks = Blocks(positions=4, block_size=2, span=4)
    blocks.lease(1, "a", 0)
    with pytest.raises(QueueError, match="was revoked") as caught:
        blocks.held(1, session)
    assert caught.value.code == "lease_revoked"


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
