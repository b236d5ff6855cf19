"""The queue in memory and the real server against a model of a run's protocol, by random commands; and its mistakes."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.contract.driving import TICK_S
from tests.contract.run_machine import LIMIT, RunMachine
from tests.contract.test_stateful import PROFILE, machine
from xtoken_core.queue.samples import Samples
from xtoken_core.wire import QueueError
from xtoken_services.queue import server

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("examples", [6, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_queues_run_as_the_model(short_tmp: Path, monkeypatch: Patch, examples: int) -> None:
    monkeypatch.setattr(server, "TICK_S", TICK_S)
    run_state_machine_as_test(
        lambda: machine(short_tmp, RunMachine, LIMIT), settings=settings(PROFILE, max_examples=examples)
    )


def test_a_rewind_that_keeps_leases_is_detected(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Samples, "reset", lambda self: None)
    with pytest.raises((AssertionError, KeyError, QueueError)):
        run_state_machine_as_test(
            lambda: machine(None, RunMachine, LIMIT), settings=settings(PROFILE, max_examples=400)
        )
