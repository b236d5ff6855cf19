"""The queue in memory and the real server against a model of the protocol, by random commands."""

import itertools
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from tests.contract.driving import TICK_S, Driven, DrivenMemory, driven_server
from tests.contract.machine import LIMIT, WORKERS, QueueMachine
from xtoken_services.queue import server

PROFILE = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    stateful_step_count=50,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate],
)
numbers = itertools.count()


def machine(directory: Path | None, kind: Any = QueueMachine, limit: int = LIMIT, kept: Path | None = None) -> Any:
    """A machine that drives the queue in memory and, given a directory, a real server; `kept`: with journals there."""

    class Both(kind):  # type: ignore[misc]
        def queues(self) -> Sequence[Driven]:
            self.stack = ExitStack()
            journals = None if kept is None else Path(tempfile.mkdtemp(dir=kept))
            memory = DrivenMemory(limit, journals and journals / "memory")
            self.stack.callback(memory.close)
            if directory is None:
                return [memory]
            place = Path(tempfile.mkdtemp(dir=directory))
            return [memory, self.stack.enter_context(driven_server(limit, place, journals and journals / "server"))]

        def teardown(self) -> None:
            with self.stack:
                super().teardown()

    return Both()


class DyingQueueMachine(QueueMachine):
    """The same with queues that die."""

    @precondition(lambda self: self.waiting is None)
    @rule(back=st.lists(st.sampled_from(WORKERS), unique=True))
    def the_queue_dies(self, back: list[str]) -> None:
        self.oracle.restart()
        for queue in self.driven:
            queue.restart()
        for worker in back:
            self.hello(worker, 0, 300.0, False)


@pytest.mark.parametrize("examples", [5, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_queues_answer_as_the_model(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    monkeypatch.setattr(server, "TICK_S", TICK_S)
    run_state_machine_as_test(lambda: machine(short_tmp), settings=settings(PROFILE, max_examples=examples))


@pytest.mark.parametrize("examples", [3, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_killed_queues_recover_as_the_model(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    monkeypatch.setattr(server, "TICK_S", TICK_S)
    made = settings(PROFILE, max_examples=examples)
    run_state_machine_as_test(lambda: machine(short_tmp, DyingQueueMachine, kept=short_tmp), settings=made)


def test_a_waiting_get_is_refused_once_another_of_its_samples_is_finished(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TICK_S", TICK_S)
    state = machine(short_tmp)
    try:
        state.begin()
        state.wait(worker="w1", kind="get", ids=[6, 3, 7, 0], fields=["x", "o"], nbytes=250, pick=5)
        state.put(worker="w1", partition="orders", ids=[2, 3], names=["y", "o", "x", "v"], salt=4, off=0, lose=False)
        state.claim(worker="w2", pick=5, count=3, fields=["v", "x"], lose=False)
        state.claim(worker="w2", pick=0, count=2, fields=["x"], lose=False)
        state.ack(worker="w1", pick=1, keep=1, lose=False)
        assert state.waiting is not None
        state.ack(worker="w1", pick=4, keep=1, lose=False)  # the last task is done with sample 3
        assert state.waiting is None
    finally:
        state.teardown()
