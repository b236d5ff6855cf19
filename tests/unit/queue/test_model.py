"""Every state of small runs: nobody gets stuck, nothing is lost or trained twice, no gradient is of a wrong signal.

Then rules of the protocol are switched off one at a time, and the model must find what each of them prevents.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.unit.queue.explore import explore
from tests.unit.queue.world import Config
from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.run.slots import SlotState, SlotTable
from xtoken_core.queue.sessions import Sessions
from xtoken_core.wire import messages as m

SMALL = Config(collators=1, block_size=2)
"""Two steps of two positions, a micro-batch each; two teachers with one slot."""
ONE_TEACHER = replace(SMALL, teachers=1)
NO_TEACHER = replace(SMALL, teachers=0)
TEACHER, TRAINER, COLLATOR = frozenset({"teacher"}), frozenset({"trainer"}), frozenset({"collator"})

FIRST_STEP = frozenset({1})
GROUPS = {"samples_per_step": 4, "positions": 8, "span": 12, "groups": 2}

RUNS = {
    "plain": SMALL,
    "two-collators": replace(ONE_TEACHER, collators=2, block_size=1, micro_batch=2),
    "two-slots": replace(SMALL, slots=2),
    "one-batch-per-step": replace(SMALL, micro_batch=2, slots=2),
    "short-last-step": replace(SMALL, positions=3, block_size=1),
    "tombstones": replace(SMALL, tombstones=frozenset({1, 2})),
    "step-of-tombstones": replace(SMALL, tombstones=frozenset({0, 1})),
    "span-ends": replace(ONE_TEACHER, positions=4, samples_per_step=1, block_size=1, span=3, collators=2),
    "two-ranks": replace(ONE_TEACHER, ranks=2),
    "first-of-two-groups": replace(ONE_TEACHER, **GROUPS, group=0, micro_batch=2, crashes=1, crashing=TEACHER),
    "second-of-two-groups": replace(ONE_TEACHER, **GROUPS, group=1, tombstones=frozenset({2}), queue_losses=1),
    "second-of-two-groups-without-a-share-of-the-last-step": replace(
        ONE_TEACHER, **{**GROUPS, "positions": 6}, group=1, crashes=1, crashing=TRAINER, checkpoints=FIRST_STEP
    ),
    "collator-crashes": replace(ONE_TEACHER, collators=2, micro_batch=2, crashes=1, crashing=COLLATOR),
    "teacher-crashes": replace(SMALL, crashes=1, crashing=TEACHER),
    "teacher-crashes-two-slots": replace(ONE_TEACHER, slots=2, crashes=1, crashing=TEACHER),
    "trainer-crashes": replace(ONE_TEACHER, crashes=1, crashing=TRAINER, checkpoints=FIRST_STEP),
    "two-crashes": replace(ONE_TEACHER, micro_batch=2, crashes=2, checkpoints=FIRST_STEP),
    "sessions-lapse": replace(ONE_TEACHER, lapses=1, checkpoints=FIRST_STEP),
    "queue-lost": replace(ONE_TEACHER, queue_losses=1, checkpoints=FIRST_STEP),
    "nacks": replace(ONE_TEACHER, nacks=1),
    "nacks-of-one-of-two-teachers": replace(SMALL, micro_batch=2, nacks=1, nacking=TEACHER),
    "nacks-below-the-limit": replace(ONE_TEACHER, nacks=2, max_attempts=2),
    "nack-and-crash": replace(ONE_TEACHER, micro_batch=2, nacks=1, crashes=1, crashing=TRAINER),
    "late-releases": replace(ONE_TEACHER, duplicates=1),
    "late-release-and-crash": replace(ONE_TEACHER, micro_batch=2, duplicates=1, crashes=1, crashing=TRAINER),
    "ahead": replace(ONE_TEACHER, slots=2, ahead=True),
    "ahead-one-slot": replace(ONE_TEACHER, ahead=True),
    "ahead-two-teachers": replace(SMALL, micro_batch=2, slots=2, ahead=True),
    "ahead-teacher-crashes": replace(ONE_TEACHER, slots=2, ahead=True, crashes=1, crashing=TEACHER),
    "ahead-trainer-crashes": replace(ONE_TEACHER, slots=2, ahead=True, crashes=1, crashing=TRAINER),
    "ahead-sessions-lapse": replace(ONE_TEACHER, micro_batch=2, slots=2, ahead=True, lapses=1),
    "no-teacher": replace(NO_TEACHER, collators=2, block_size=1),
    "no-teacher-tombstones": replace(NO_TEACHER, tombstones=frozenset({0, 1, 3}), checkpoints=FIRST_STEP, crashes=1),
    "no-teacher-two-ranks": replace(NO_TEACHER, ranks=2, crashes=1, checkpoints=FIRST_STEP),
    "no-teacher-queue-lost": replace(NO_TEACHER, queue_losses=1, checkpoints=FIRST_STEP),
    "lost-answers": replace(SMALL, micro_batch=2, losses=1),
    "lost-answer-and-crash": replace(ONE_TEACHER, micro_batch=2, losses=1, crashes=1, crashing=TEACHER),
}

PROMPTS = replace(NO_TEACHER, positions=6, collators=0, rollouts=1, prompts=2)
"""Three steps of two prompts; weights are published after every step."""
MIXED = replace(ONE_TEACHER, rollouts=1, prompts=1, block_size=1)
"""Two steps of a text and a prompt."""
ROLLOUT = frozenset({"rollout"})
RUNS |= {
    "prompts": PROMPTS,
    "prompts-and-text": MIXED,
    "prompts-of-stale-weights": replace(PROMPTS, max_staleness=1, publish_every=2, rollouts=2, block_size=1),
    "prompts-tombstones": replace(PROMPTS, tombstones=frozenset({1, 2, 3}), crashes=1, checkpoints=FIRST_STEP),
    "prompts-rollout-crashes": replace(MIXED, crashes=1, crashing=ROLLOUT),
    "prompts-trainer-crashes": replace(
        PROMPTS, max_staleness=1, publish_every=2, crashes=1, crashing=TRAINER, checkpoints=FIRST_STEP
    ),
    "prompts-teacher-crashes": replace(MIXED, crashes=1, crashing=TEACHER),
    "prompts-sessions-lapse": replace(PROMPTS, max_staleness=1, lapses=1, checkpoints=FIRST_STEP),
    "prompts-queue-lost": replace(PROMPTS, max_staleness=1, queue_losses=1, checkpoints=FIRST_STEP),
    "prompts-nacks": replace(MIXED, nacks=1),
    "prompts-lost-answers": replace(PROMPTS, max_staleness=1, losses=1),
}  # fmt: skip

COLD = replace(PROMPTS, collators=1, after=1)
"""A step of text, then two of prompts: their weights are published from the switch on."""
RUNS |= {
    "cold-start": COLD,
    "cold-start-with-a-teacher": replace(ONE_TEACHER, rollouts=1, prompts=2, after=1),
    "cold-start-that-publishes-before-the-switch": replace(
        COLD, positions=8, span=8, after=2, max_staleness=1, publish_every=2
    ),
    "cold-start-trainer-crashes": replace(
        COLD, after=2, max_staleness=1, crashes=1, crashing=TRAINER, checkpoints=FIRST_STEP
    ),
    "cold-start-rollout-crashes": replace(COLD, crashes=1, crashing=ROLLOUT),
    "cold-start-sessions-lapse": replace(COLD, max_staleness=1, lapses=1, checkpoints=FIRST_STEP),
    "cold-start-queue-lost": replace(COLD, queue_losses=1, checkpoints=FIRST_STEP),
    "cold-start-then-more-and-more-prompts": replace(
        COLD, block_size=1, prompts=1, last_prompts=2, crashes=1, crashing=TRAINER, checkpoints=FIRST_STEP
    ),
}

ROUTED = replace(SMALL, routes=((0,), (1,)))
"""Of every step a position for each teacher."""
RUNS |= {
    "routes": ROUTED,
    "routes-to-one-and-to-both": replace(SMALL, routes=((0,), (0, 1), (1,))),
    "routes-to-one-teacher-only": replace(SMALL, micro_batch=2, routes=((1,),), crashes=1, crashing=TRAINER),
    "routes-teacher-crashes": replace(ROUTED, crashes=1, crashing=TEACHER),
    "routes-trainer-crashes": replace(ROUTED, crashes=1, crashing=TRAINER, checkpoints=FIRST_STEP),
    "routes-queue-lost": replace(ROUTED, queue_losses=1, checkpoints=FIRST_STEP),
    "routes-nacks": replace(ROUTED, nacks=1),
    "routes-of-prompts": replace(PROMPTS, teachers=2, routes=((0,), (1,)), crashes=1, crashing=ROLLOUT),
}

QUICK = {"plain", "tombstones", "two-ranks", "lost-answers", "trainer-crashes", "prompts", "cold-start", "routes"}
"""Runs of the default suite."""
LARGE_RUNS = {
    "no-teacher-two-crashes": replace(NO_TEACHER, collators=2, block_size=1, crashes=2, checkpoints=FIRST_STEP),
    "no-teacher-sessions-lapse": replace(NO_TEACHER, lapses=2, checkpoints=FIRST_STEP),
    "no-teacher-nacks": replace(NO_TEACHER, nacks=2, max_attempts=2, crashes=1, crashing=TRAINER),
    "no-teacher-ahead": replace(NO_TEACHER, ahead=True, nacks=1, losses=1, crashes=1),
    "two-collators-two-teachers": replace(SMALL, collators=2, block_size=1),
    "trainer-crashes": replace(SMALL, crashes=1, crashing=TRAINER, checkpoints=FIRST_STEP),
    "trainer-crashes-one-batch-per-step": replace(SMALL, micro_batch=2, crashes=1, crashing=TRAINER),
    "ahead-two-teachers": replace(SMALL, slots=2, ahead=True, crashes=1),
    "two-crashes": replace(ONE_TEACHER, crashes=2, checkpoints=FIRST_STEP),
    "two-crashes-of-teachers": replace(SMALL, crashes=2, crashing=TEACHER, micro_batch=2),
    "lost-answer-and-crash": replace(ONE_TEACHER, losses=1, crashes=1, checkpoints=FIRST_STEP),
    "nack-and-crash": replace(SMALL, micro_batch=2, nacks=1, crashes=1),
    "nack-lost-answer-late-release": replace(ONE_TEACHER, nacks=1, losses=1, duplicates=1),
    "three-steps": replace(SMALL, positions=6, slots=2, crashes=1, crashing=TEACHER),
    "two-ranks-trainer-crashes": replace(ONE_TEACHER, ranks=2, crashes=1, crashing=TRAINER),
    "two-ranks-teacher-crashes": replace(ONE_TEACHER, ranks=2, crashes=1, crashing=TEACHER),
    "two-ranks-two-teachers": replace(SMALL, ranks=2),
}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_every_state_of_a_run_is_right(name: str) -> None:
    outcome = explore(RUNS[name])
    assert not outcome.violation, outcome
    assert outcome.finals


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGE_RUNS)
def test_every_state_of_a_larger_run_is_right(name: str) -> None:
    outcome = explore(LARGE_RUNS[name])
    assert not outcome.violation, outcome


class HandlesOutliveTheirTeacher(RunProtocol):
    """The rings of a teacher's session stay when it ends, with what is in them."""

    def session_ended(self, session: str) -> None:
        orphans = [ring for ring in self.rings.of_session(session) if ring.teacher_session == session]
        for ring in orphans:
            self.rings.drop(ring)
        super().session_ended(session)
        for ring in orphans:
            self.rings.by_pair[ring.teacher, ring.rank] = ring
            for slot in ring.slots:
                if slot.state == SlotState.FILLING:
                    slot.free()


class BackPressureAtThePut(RunProtocol):
    """Any block is leased; what is put is admitted as long as there is room for `span` rows."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.room = self.blocks.span
        self.blocks.span = self.positions

    def put_block(self, request: m.Put, fields: Iterable[str], *_: object) -> list[int]:
        if len(self.samples.samples) + len(request.ids) > self.room:
            return None  # type: ignore[return-value]
        return super().put_block(request, fields)


class RewindsForgetRoutes(RunProtocol):
    """A row that outlives a rewind is compared by all teachers."""

    def rewind(self, request: m.Rewind) -> list[int]:
        self.slots.routes.clear()
        return super().rewind(request)


class NeverRedo(RunProtocol):
    """Every step may be taken."""

    def check_step(self, request: m.CheckStep) -> m.Verdict:
        super().check_step(request)
        return m.Verdict(redo=False)


def violation_without_a_rule(name: str, **changes: Any) -> str:
    """What goes wrong in a run of `RUNS`, in which nothing does with every rule in force."""
    return explore(replace(RUNS[name], **changes)).violation


def test_claims_out_of_plan_order_deadlock() -> None:
    assert violation_without_a_rule("plain", in_plan_order=False).startswith("stuck")


@pytest.mark.slow
def test_handles_that_outlive_their_teacher_are_read() -> None:
    found = violation_without_a_rule("teacher-crashes", protocol=HandlesOutliveTheirTeacher)
    assert found.startswith("foreign signal")


def test_back_pressure_at_the_put_deadlocks() -> None:
    found = violation_without_a_rule("span-ends", protocol=BackPressureAtThePut, bounded_positions=False)
    assert found.startswith("stuck")


def test_without_generations_a_late_release_frees_a_slot_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotTable, "is_current", staticmethod(lambda slot, generation: True))
    assert violation_without_a_rule("late-releases").startswith("foreign signal")


@pytest.mark.slow
def test_a_row_without_its_route_waits_for_a_teacher_that_never_comes() -> None:
    assert violation_without_a_rule("routes-to-one-teacher-only", protocol=RewindsForgetRoutes).startswith("stuck")


@pytest.mark.parametrize(("name", "expected"), [("nacks", "denominator"), ("sessions-lapse", "foreign signal")])
def test_without_redo_a_wrong_step_is_taken(name: str, expected: str) -> None:
    assert violation_without_a_rule(name, protocol=NeverRedo).startswith(expected)


class RowsOutliveRewinds(RunProtocol):
    """A rewind keeps the completions that are there."""

    def is_prompt(self, position: int) -> bool:
        return not getattr(self, "rewinding", False) and super().is_prompt(position)

    def rewind(self, request: m.Rewind) -> list[int]:
        self.rewinding = True
        dropped = super().rewind(request)
        self.rewinding = False
        return dropped


class UnboundedStaleness(RunProtocol):
    """Prompts are leased as far ahead as text."""

    def last_step_of(self, version: int) -> int:
        return version + self.positions


def test_without_dropping_rows_a_rewind_trains_text_of_lost_weights() -> None:
    assert violation_without_a_rule("prompts-trainer-crashes", protocol=RowsOutliveRewinds).startswith("stale")


def test_without_a_span_of_their_own_prompts_are_stale() -> None:
    assert violation_without_a_rule("prompts", protocol=UnboundedStaleness).startswith("stale")


class ColdStartIsForgotten(RunProtocol):
    """The first steps have prompts as well."""

    def __init__(self, sessions: Sessions, run: m.RunDef, **settings: Any) -> None:
        super().__init__(sessions, msgspec.structs.replace(run, after=0), **settings)


def test_prompts_before_the_switch_wait_for_weights_for_ever() -> None:
    assert violation_without_a_rule("cold-start", protocol=ColdStartIsForgotten).startswith("stuck")


def test_publishing_too_rarely_gets_stuck() -> None:
    assert violation_without_a_rule("prompts", publish_every=2).startswith("stuck")


def test_without_restarts_a_trainer_crash_at_the_end_gets_stuck() -> None:
    assert violation_without_a_rule("trainer-crashes", supervised=False).startswith("stuck")
