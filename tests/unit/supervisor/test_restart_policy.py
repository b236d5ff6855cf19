"""Restarts with back-off, reset by progress."""

import pytest

from xtoken_services.supervisor.process_group import LONGEST_DELAY_S, RestartPolicy


def test_delays_double_up_to_the_longest_and_the_limit() -> None:
    policy = RestartPolicy(9, first_delay_s=0.5)
    delays = [policy.record_failure(3) for _ in range(10)]
    assert delays == [0.5, 1, 2, 4, 8, 16, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S, None]


def test_progress_resets_the_count() -> None:
    policy = RestartPolicy(1, first_delay_s=1)
    assert [policy.record_failure(step) for step in (0, 1, 2, 3)] == [1, 1, 1, 1]
    assert policy.record_failure(3) is None


def test_repeated_steps_are_no_progress() -> None:
    policy = RestartPolicy(2, first_delay_s=1)
    assert [policy.record_failure(step) for step in (9, 4, 9)] == [1, 2, None]


@pytest.mark.parametrize("step", [0, 5])
def test_no_restarts(step: int) -> None:
    assert RestartPolicy(0).record_failure(step) is None
