"""Restarts with back-off, forgiven by progress."""

from __future__ import annotations

import pytest

from services.supervisor.restart_policy import LONGEST_DELAY_S, RestartPolicy


def test_delays_double_up_to_a_longest_and_the_limit_is_the_last() -> None:
    policy = RestartPolicy(9, first_delay_s=0.5)
    delays = [policy.failed(3) for _ in range(10)]
    assert delays == [0.5, 1, 2, 4, 8, 16, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S, None]


def test_progress_starts_the_count_anew() -> None:
    policy = RestartPolicy(1, first_delay_s=1)
    assert [policy.failed(step) for step in (0, 1, 2, 3)] == [1, 1, 1, 1]
    assert policy.failed(3) is None


def test_doing_old_steps_again_is_no_progress() -> None:
    policy = RestartPolicy(2, first_delay_s=1)
    assert [policy.failed(step) for step in (9, 4, 9)] == [1, 2, None]


@pytest.mark.parametrize("step", [0, 5])
def test_no_restarts_at_all(step: int) -> None:
    assert RestartPolicy(0).failed(step) is None
