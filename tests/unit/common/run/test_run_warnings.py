"""Warnings about a run's metrics, on the console and as text."""

import io
from typing import Any

from rich.console import Console

from tests.support.cases import cases
from tests.support.evaluations import measured
from tests.unit.supervisor.test_progress import status as status_of
from xtoken_services.common.run.run_warnings import warnings_of
from xtoken_services.common.run.status import RunStatus
from xtoken_services.supervisor.progress import LineView, final_line, metrics_of

EVALUATIONS = {"first_evaluation": measured(2.329), "evaluation": measured(2.38, 100)}


LAST = {"step": 99, "unreachable_mass_t0": 0.44, "kl_fraction": 0.02, "kl_loss_scale": 1.0}


def status(**changes: Any) -> RunStatus:
    over = {"state": "completed", "step": 100, "steps": 100, "last": LAST, "queue": None, "workers": []}
    return status_of(**over | {"summary": {"trained": 8, "positions": 8}} | EVALUATIONS | changes)


def changed(run: RunStatus, **changes: Any) -> RunStatus:
    return run.model_copy(update=changes)


def test_each_kind_of_harm_is_named() -> None:
    warnings = warnings_of(status())
    assert warnings["unreachable_mass_t0"].startswith("44% of the probability of the teacher is on tokens")
    assert warnings["kl_fraction"].startswith("the divergence from the teacher is 2.0% of the loss")
    assert warnings["bits_per_byte"].startswith("held-out text is worse than at step 0: 2.3800")


def test_harmless_metrics_are_not() -> None:
    better = measured(2.1, 100)
    harmless = {"unreachable_mass_t0": 0.05, "kl_fraction": 0.6, "kl_loss_scale": 1.0}
    assert warnings_of(status(last=harmless, evaluation=better)) == {}
    assert warnings_of(status(last=None, evaluation=EVALUATIONS["first_evaluation"])) == {}
    unchanged = measured(2.3291, 100)
    assert warnings_of(status(last=harmless, evaluation=unchanged)) == {}
    assert "(since step 0: no difference that counts (+0.0001;" in final_line(status(evaluation=unchanged))
    assert warnings_of(status(last={"kl_fraction": 0.0, "kl_loss_scale": 0.0}, evaluation=better)) == {}
    faint = status(last={"kl_fraction": 0.01, "kl_loss_scale": 0.1}, evaluation=better)
    assert warnings_of(faint).keys() == {"kl_fraction"}
    fading = {"spec": {"loss": {"kl_loss_weight": 1.0, "kl_loss_weight_end": 0.0}}}
    assert warnings_of(changed(faint, **fading)) == {}, "the weight has been lowered to a tenth"
    begun = status(last={"kl_fraction": 0.01, "kl_loss_scale": 0.9}, evaluation=better)
    assert warnings_of(changed(begun, **fading)).keys() == {"kl_fraction"}


def test_a_teacher_is_compared_with_the_student() -> None:
    def told(teacher: float, error: float | None = 0.01) -> RunStatus:
        first, last = (
            {**each, "teacher_bits_per_byte": teacher, "teacher_difference_error": error}
            for each in EVALUATIONS.values()
        )
        return status(last=None, first_evaluation=first, evaluation={**last, "bits_per_byte": 2.08})

    worse = warnings_of(told(2.4))["teacher_bits_per_byte"]
    assert "before any training: 2.4000 and 2.3290 (4 documents, 4,000 bytes) bits per byte" in worse
    assert warnings_of(told(2.4, 0.04)) == {} == warnings_of(told(2.4, None)), "within two standard errors"
    assert warnings_of(told(1.831)) == {}
    beside = "the teacher has 1.8310, better than the student at step 0, 50% of the distance to it is covered"
    assert beside in final_line(told(1.831))
    assert "better than the student at step 0, the student has passed it; model in" in final_line(told(2.2))
    assert "the teacher has 2.4000, worse than the student at step 0; model in" in final_line(told(2.4))
    assert "the teacher has 2.4000; model in" in final_line(told(2.4, 0.04))
    assert ("teacher", "1.8310") in metrics_of(told(1.831))


def test_a_run_that_keeps_its_best_student_is_judged_by_that() -> None:
    best = {"best_evaluation": measured(2.1, 40)}
    kept = status(**best, spec={"eval": {"keep_best": True}})
    assert "bits_per_byte" not in warnings_of(kept) and "bits_per_byte" in warnings_of(status(**best))
    line = final_line(kept)
    assert "2.1000 (4 documents, 4,000 bytes) bits per byte on held-out text after step 40, the best (since" in line
    assert "step 0: better by 0.2290 ±" in line
    assert ("best", "2.1000 of step 40") in metrics_of(kept)
    by_tasks = changed(kept, spec={"eval": {"keep_best": True}, "rollout": {"stop_when_worse": 2}})
    assert "on held-out text after step 40, the best by tasks (since" in final_line(by_tasks)
    assert ("best by tasks", "2.1000 of step 40") in metrics_of(by_tasks)
    none_yet = changed(kept, best_evaluation=None, evaluation=EVALUATIONS["first_evaluation"])
    assert "2.3290 (4 documents, 4,000 bytes) bits per byte on held-out text after step 0; model in" in final_line(
        none_yet
    )
    last = {"trained": 8, "positions": 8} | {"held_out": {"step": 100}}  # the checkpoint of step 40 was missing
    assert "2.3800 (4 documents, 4,000 bytes) bits per byte on held-out text after step 100" in final_line(
        changed(kept, summary=last)
    )


def test_the_console_prints_a_warning_once_and_the_end_the_change() -> None:
    file = io.StringIO()
    view = LineView(Console(file=file, width=400))
    for _ in range(3):
        view.show(status(state="running"))
    assert file.getvalue().count("worse than at step 0") == 1
    later = LAST | {"unreachable_mass_t1": 0.3}
    for _ in range(2):
        view.show(status(state="running", last=later))
    assert file.getvalue().count("30% of the probability of teacher 1") == 1, "a warning that comes after others"
    assert file.getvalue().count("worse than at step 0") == 1
    assert "bits per byte on held-out text (since step 0: worse by 0.0510 ± 0.0000)" in final_line(status())


def test_an_exported_student_past_its_best_step_is_told_at_the_end() -> None:
    over = status(evaluation=measured(2.3, 100), last=None, best_evaluation=measured(2.1, 40))
    line = warnings_of(over)["best"]
    assert "2.3000 (4 documents, 4,000 bytes) bits per byte on held-out text after 100 steps, 2.1000 after 40" in line
    assert "eval.keep_best = true" in line
    file = io.StringIO()
    view = LineView(Console(file=file, width=400))
    view.end(over)
    assert line in file.getvalue().splitlines()[0]
    kept = changed(over, spec={"eval": {"keep_best": True}})
    as_good = changed(over, best_evaluation=measured(2.295, 40))
    unsure = changed(over, best_evaluation=measured(2.1, 40, apart=0.4))
    for harmless in (kept, as_good, unsure, changed(over, best_evaluation=None), changed(over, summary=None)):
        assert "best" not in warnings_of(harmless)


COMPLETIONS = {"entropy": 0.4, "finished": 0.88, "completion_tokens": 30.0, "overlap_ratio": 0.6}


@cases(
    "last, begins",
    ({"entropy": 0.81}, "the student writes more and more at random: its completions have 0.81 nats a token, 0.40"),
    ({"finished": 0.77}, "77% of the completions end by themselves, 88% did at first"),
    ({"completion_tokens": 61.0}, "completions have grown to 61 tokens, from 30 at first"),
    ({"overlap_ratio": 0.29}, "29% of what student and teacher find likeliest on completions is common, 60% was"),
    ids=str,
)
def test_completions_that_run_away_are_said_with_what_to_change(last: dict[str, float], begins: str) -> None:
    spec = {"loss": {"mode": "chain", "reverse_kl": False, "beta": None}, "eval": {"keep_best": True}}
    run = status(last=None, evaluation=None, spec=spec, completions={"first": COMPLETIONS, "last": COMPLETIONS | last})
    [line] = warnings_of(run).values()
    assert line.startswith(begins) and f"({next(iter(last))})" in line
    assert line.endswith(
        'set loss.mode = "chain" with loss.reverse_kl = true or loss.beta, or lower train.learning_rate'
    )
    reverse = changed(run, spec={"loss": {"mode": "chain", "reverse_kl": True, "beta": None}})
    [line] = warnings_of(reverse).values()
    assert "loss.reverse_kl" not in line
    assert line.endswith("lower train.learning_rate, and keep the best student by eval.keep_best = true")
    [line] = warnings_of(changed(run, spec=spec | {"rollout": {"learning_rate": 2e-5}})).values()
    assert line.endswith("or lower rollout.learning_rate")
    file = io.StringIO()
    view = LineView(Console(file=file, width=400))
    for _ in range(2):
        view.show(changed(run, state="running"))
    assert file.getvalue().count(begins) == 1


def test_completions_of_a_certain_student_may_vary_more() -> None:
    for last, names in ((0.5, set()), (0.51, {"entropy"})):
        both = {"first": {"entropy": 0.004}, "last": {"entropy": last}}
        assert set(warnings_of(status(last=None, evaluation=None, completions=both))) == names


def test_completions_that_are_as_they_were_are_not() -> None:
    limits = {"entropy": 0.8, "finished": 0.79, "completion_tokens": 60.0, "overlap_ratio": 0.3}
    better = {"entropy": 0.1, "finished": 1.0, "completion_tokens": 9.0, "overlap_ratio": 0.9}
    for last in (COMPLETIONS, limits, better, {}):
        for first in (COMPLETIONS, {}):
            both = {"first": first, "last": last}
            assert warnings_of(status(last=None, evaluation=None, completions=both)) == {}, both
