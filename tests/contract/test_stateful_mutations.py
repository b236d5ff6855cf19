"""The random commands can fail: each of these mistakes in the queue's rules is found by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.contract import driving
from tests.contract.test_stateful import PROFILE, machine
from xtoken_core.queue import engine, sessions
from xtoken_core.queue import samples as base
from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.partition import Partition
from xtoken_core.queue.reply_cache import ReplyCache
from xtoken_core.queue.sample import Status, Task
from xtoken_core.queue.samples import Samples
from xtoken_core.queue.store import Store
from xtoken_core.queue.tasks import partition
from xtoken_core.queue.tasks import samples as ordered
from xtoken_core.queue.tasks.partition import TaskPartition
from xtoken_core.queue.tasks.samples import OrderedSamples
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_services.queue import server, waiting

EXAMPLES = 400
Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}
ON_THE_SERVER = {"a-put-wakes-nobody", "waiting-is-a-sign-of-life"}


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
def one_attempt_more_until_death(patch: Patch) -> None:
    init = Samples.__init__
    patch.setattr(Samples, "__init__", lambda self, tasks, limit=3: init(self, tasks, limit + 1))


@mutation
def a_nack_counts_for_the_whole_lease(patch: Patch) -> None:
    refuse = Samples.refuse
    patch.setattr(Samples, "refuse", lambda self, lease, ids, why: refuse(self, lease, self.leases[lease].ids, why))


@mutation
def arrival_is_the_order_of_puts(patch: Patch) -> None:
    enqueue = OrderedSamples._enqueue

    def by_put(self: OrderedSamples, sample: Any, tasks: Any) -> None:
        self._ready_count = sample.put_at - 1
        enqueue(self, sample, tasks)

    patch.setattr(OrderedSamples, "_enqueue", by_put)


@mutation
def what_comes_back_goes_first(patch: Patch) -> None:
    give_back = Samples.give_back

    def first(self: OrderedSamples, lease: int) -> Any:
        self._ready_count, kept = -1000, self._ready_count
        try:
            return give_back(self, lease)
        finally:
            self._ready_count = kept

    patch.setattr(OrderedSamples, "give_back", first)


@mutation
def strict_order_skips_what_is_not_ready(patch: Patch) -> None:
    tasks = partition.tasks_of
    patch.setattr(
        partition,
        "tasks_of",
        lambda d: [Task(t.name, t.requires, "arrival" if t.order == "strict" else t.order) for t in tasks(d)],
    )


@mutation
def answers_are_not_kept(patch: Patch) -> None:
    patch.setattr(ReplyCache, "get", lambda self, session, request: None)


@mutation
def volatile_fields_stay(patch: Patch) -> None:
    patch.setattr(TaskPartition, "own_volatile", lambda self, session, put, task="": None)


@mutation
def a_completed_task_stays_done_without_its_result(patch: Patch) -> None:
    patch.setattr(OrderedSamples, "reopen", lambda self, sample, task: None)


@mutation
def what_is_finished_may_be_put_again(patch: Patch) -> None:
    patch.setattr(IntervalSet, "add", lambda self, start, stop=None: None)


@mutation
def an_older_incarnation_lives_on(patch: Patch) -> None:
    patch.setattr(sessions.Sessions, "open", lambda self, session: self.live.update({session.id: session}))


@mutation
def silence_is_eternal_life(patch: Patch) -> None:
    patch.setattr(sessions.Sessions, "silent", lambda self, now: [])


@mutation
def memory_is_without_limit(patch: Patch) -> None:
    put = TaskPartition.put

    def roomy(part: Any, request: Any, columns: Any, room: int) -> Any:
        answer = put(part, request, columns, 1 << 40)
        answer.reply.room = max(0, room - sum(c.nbytes for c in columns.values()))
        return answer

    patch.setattr(TaskPartition, "put", roomy)


@mutation
def memory_is_not_freed(patch: Patch) -> None:
    patch.setattr(Store, "drop", lambda self, ids: None)


@mutation
def the_first_task_lets_a_sample_go(patch: Patch) -> None:
    finish = Samples.finish

    def early(self: Samples, task: str, ids: Any) -> Any:
        ids = list(ids)
        for i in ids:
            for other in self.tasks:
                self.samples[i].status[other] = Status.DONE
        return finish(self, task, ids)

    patch.setattr(Samples, "finish", early)


@mutation
def nothing_is_ever_exhausted(patch: Patch) -> None:
    patch.setattr(TaskPartition, "exhausted", lambda self, task: False)


@mutation
def claims_by_ids_take_what_is_ready(patch: Patch) -> None:
    def some(self: Samples, session: str, task: str, ids: Any, fields: Any = ()) -> Any:
        ready = tuple(i for i in ids if i in self.samples and self.samples[i].status[task] == Status.READY)
        return self._lease(session, task, ready) if ready else None

    patch.setattr(Samples, "claim_ids", some)


@mutation
def a_claim_that_cannot_be_read_leases(patch: Patch) -> None:
    patch.setattr(ordered, "check_fields", lambda sample, needed: None)
    patch.setattr(base, "check_fields", lambda sample, needed: None)


@mutation
def a_field_may_change_its_kind(patch: Patch) -> None:
    patch.setattr(Partition, "check", lambda self, columns, rows: None)


@mutation
def clearing_unseals_nothing(patch: Patch) -> None:
    reset = TaskPartition.reset

    def sealed(self: Any) -> None:
        kept = self.sealed
        reset(self)
        self.sealed = kept

    patch.setattr(TaskPartition, "reset", sealed)


@mutation
def a_put_wakes_nobody(patch: Patch) -> None:
    patch.setattr(waiting.Waiting, "wake", lambda self, request: None)
    patch.setattr(driving, "PATIENCE_S", 1.0)


@mutation
def waiting_is_a_sign_of_life(patch: Patch) -> None:
    handle = engine.Engine.handle
    patch.setattr(engine.Engine, "handle", lambda self, request, buffers, waited=False: handle(self, request, buffers))


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("an-ack-is-taken-once", "leases-outlive-their-session")
        else pytest.param(name, marks=[pytest.mark.slow])
        for name in MUTATIONS
    ],
)
def test_mutation_is_detected(name: str, monkeypatch: pytest.MonkeyPatch, short_tmp: Path) -> None:
    monkeypatch.setattr(server, "TICK_S", driving.TICK_S)
    MUTATIONS[name](monkeypatch)
    place = short_tmp if name in ON_THE_SERVER else None
    with pytest.raises((AssertionError, KeyError, QueueError)):
        run_state_machine_as_test(lambda: machine(place), settings=settings(PROFILE, max_examples=EXAMPLES))
