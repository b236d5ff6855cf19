"""The random commands can fail: each of these mistakes in the queue's rules is found by them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.contract import driving
from tests.contract.test_stateful import PROFILE, machine
from xtoken_core.queue.tasks.partition import TaskPartition
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_services.queue import server, waiting

EXAMPLES = 400
Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}
ON_THE_SERVER = {"a-put-wakes-nobody"}
SLOW = {"an-ack-is-taken-once", *ON_THE_SERVER}


def mutation(make: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[make.__name__.replace("_", "-")] = make
    return make


@mutation
def an_ack_is_taken_once(patch: Patch) -> None:
    ack = TaskPartition.ack

    def once(part: Any, request: m.Ack) -> Any:
        mine = {i for lease in part.samples.of_session(request.session) for i in lease.ids}
        if not mine.issuperset(request.ids):
            raise QueueError("lease_revoked", "not leased")
        return ack(part, request)

    patch.setitem(TaskPartition.HANDLERS, m.Ack, once)  # type: ignore[arg-type]


@mutation
def leases_outlive_their_session(patch: Patch) -> None:
    patch.setattr(TaskPartition, "session_ended", lambda self, session: None)


@mutation
def a_put_wakes_nobody(patch: Patch) -> None:
    patch.setattr(waiting.Waiting, "wake", lambda self, request: None)
    patch.setattr(driving, "PATIENCE_S", 1.0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MUTATIONS])
def test_mutation_is_detected(name: str, monkeypatch: pytest.MonkeyPatch, short_tmp: Path) -> None:
    monkeypatch.setattr(server, "TICK_S", driving.TICK_S)
    MUTATIONS[name](monkeypatch)
    place = short_tmp if name in ON_THE_SERVER else None
    with pytest.raises((AssertionError, KeyError, QueueError)):
        run_state_machine_as_test(lambda: machine(place), settings=settings(PROFILE, max_examples=EXAMPLES))
