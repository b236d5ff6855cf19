"""Node groups: a queue has its share of every step, and nothing of the others'."""

import pytest

from tests.unit.queue.run_calls import ack_window, lease_block, make_run, put_block, rewind, rows
from xtoken_core.wire import QueueError


def test_blocks_of_one_node_group() -> None:
    run = make_run(positions=11, samples_per_step=4, block_size=1, span=12, group=1, groups=2)
    assert [list(run.window(step)) for step in range(3)] == [[2, 3], [6, 7], [10]]
    handed = []
    while (block := lease_block(run)) is not None:
        handed += range(block.first, block.first + block.count)
        put_block(run, block.lease, handed[-1:])
    assert handed == [2, 3, 6, 7, 10]
    assert rows(run, 0) == [2, 3]


def test_empty_part_of_the_last_step() -> None:
    run = make_run(positions=5, samples_per_step=4, block_size=2, span=12, group=1, groups=2)
    rewind(run, step=1)
    assert lease_block(run) is None
    assert rows(run, 1) == []
    assert not run.ended
    assert ack_window(run, 1) == []
    assert run.ended


@pytest.mark.parametrize("wrong", [{"group": 2, "groups": 2}, {"groups": 2, "block_size": 2}], ids=["group", "share"])
def test_a_share_that_is_not_whole_blocks_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(QueueError, match="no share of whole blocks"):
        make_run(**wrong)
