"""Node groups that plan their own shares of a step agree on what is one step's: four real ranks over gloo."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.ranks import start_ranks
from tests.support.runs import resolved_run
from xtoken_services.trainer.distributed import RankGroup

RANKS = 4


@pytest.mark.slow
def test_groups_agree_on_counts_denominators_and_what_has_become_of_all_positions(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.trainer.share_process", str(tmp_path / "said.json")]
    for process in start_ranks(command, RANKS):
        _, errors = process.communicate(timeout=250)
        assert process.returncode == 0, errors
    said = json.loads((tmp_path / "said.json").read_text())
    assert [rank["node"] for rank in said] == [0, 0, 1, 1]
    assert [rank["leads"] for rank in said] == [[True, True], [False, False], [False, True], [False, False]]
    assert [rank["rewinds"] for rank in said] == [100, 100, 102, 102]  # each group's own first rank's
    for rank in said:
        assert rank["micro_batches"] == [2, 2]  # the first group's, also where there is no row at all
        assert rank["denominators"] == [7 + 8, 20 + 21, 3, 1]
        assert rank["account"] == {"ids": [0, 1, 2], "skipped": {"3": "empty"}, "dead": {"4": "refused"}}
    assert [rank["own"] for rank in said] == [[[0, 1, 2], [], []]] * 2 + [[[], [3], [4]]] * 2


def test_a_group_owns_its_share_of_every_step(tmp_path: Path) -> None:
    run = resolved_run(tmp_path, nodes=4)
    groups = [run.model_copy(update={"group": group}) for group in range(4)]
    assert [[p for p in range(16) if group.owns(p)] for group in groups] == [
        [0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15],
    ]  # fmt: skip
    assert run.world == 4


@pytest.mark.parametrize(("rank", "node"), [(0, 0), (2, 0), (3, 1), (5, 1)])
def test_ranks_are_shared_out_in_order(rank: int, node: int) -> None:
    group = RankGroup(0, 1)
    group.rank, group.size, group.nodes = rank, 6, 2
    assert group.node == node
