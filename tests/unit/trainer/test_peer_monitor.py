"""Ranks of torchrun end when another one has, although they hang: two real ranks over gloo."""

import sys

import pytest

from tests.support.ranks import start_ranks


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "raise"])
def test_a_hanging_rank_ends_when_another_is_killed_or_fails(how: str) -> None:
    first, second = start_ranks([sys.executable, "-m", "tests.unit.trainer.hanging_process", how], 2)
    try:
        for rank in (first, second):
            assert rank.stdout is not None
            assert rank.stdout.readline() == "met\n"
        if how == "hang":
            second.kill()
        _, errors = first.communicate(timeout=60)
        assert first.returncode == 1, errors
        assert "another rank has failed or was killed" in errors
        assert second.wait(timeout=60) == (1 if how == "raise" else -9)
    finally:
        for rank in (first, second):
            rank.kill()
            rank.communicate()
