"""Kills of a queue with a journal, under load: see `tests.contract.killing`."""

from pathlib import Path

import pytest

from tests.contract.killing import kill_repeatedly


@pytest.mark.parametrize(
    ("kills", "fsync"),
    [(1, "always"), pytest.param(200, "interval", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_kills_under_load(short_tmp: Path, kills: int, fsync: str) -> None:
    found = kill_repeatedly(short_tmp / f"k{kills}", kills, fsync=fsync)
    assert found.errors == []
    assert (found.lost, found.after_ack) == ([], [])
    assert found.puts > 20 * kills
    assert found.steps > kills
