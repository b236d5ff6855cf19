"""Progress of a run, and the time that remains."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.cases import cases
from xtoken_services.common.run.status import RunStatus
from xtoken_services.supervisor.progress import (
    FailsafeView,
    ProgressView,
    final_line,
    open_view,
    render_status,
    status_line,
)
from xtoken_services.supervisor.run_files import Curve, with_files

WORKER = {
    "name": "trainer-0", "kind": "trainer", "state": "running", "pid": 41, "phase": "run", "progress": 3,
    "heartbeat_age_s": 1.2, "restarts": 0, "incarnation": 1, "exit_code": None,
}  # fmt: skip


def status(**changes: Any) -> RunStatus:
    """A run under way, with changes."""
    return RunStatus.model_validate({
        "id": "tiny-1", "created": "2026-01-01T00:00:00+00:00",
        "name": "tiny", "state": "running", "output": "/runs/tiny", "step": 3, "steps": 12, "error": "",
        "last": {"step": 2, "loss": 4.5, "ce_loss": 5.25, "kl_loss": 3.75, "grad_norm": 1.5,
                 "tokens_per_second": 4511.0},
        "evaluation": {"step": 0, "bits_per_byte": 2.5}, "checkpoint": 3, "summary": None,
        "queue": {"samples": 24, "bytes": 3 << 20, "memory_limit": 1 << 30, "tasks": {}}, "workers": [WORKER],
        **changes,
    })  # fmt: skip


def test_a_line_of_progress() -> None:
    assert status_line(status()) == (
        "tiny: running, step 3/12, loss 4.5000, ce_loss 5.2500, kl_loss 3.7500, tokens/s 4,511, "
        "bits per byte 2.5000, queue 24 samples"
    )


def test_workers_in_trouble_are_named() -> None:
    worker = WORKER | {"state": "waiting", "restarts": 2, "pid": None, "heartbeat_age_s": None}
    assert status_line(status(workers=[worker])).endswith(", trainer-0 waiting (2 restarts)")


def test_before_anything_is_known() -> None:
    bare = status(step=None, steps=None, last=None, evaluation=None, queue=None, workers=[], state="starting")
    assert status_line(bare) == "tiny: starting, checking models, tokenizers and text"
    Console(file=io.StringIO()).print(render_status(bare, ""))


def workers(**phases: str) -> list[dict[str, Any]]:
    """Running workers by their names and phases, `_` for `-`."""
    named = {name.replace("_", "-"): phase for name, phase in phases.items()}
    return [WORKER | {"name": name, "kind": name.partition("-")[0], "phase": phase} for name, phase in named.items()]


def test_at_the_start_a_line_says_what_is_waited_for() -> None:
    empty = {"samples": 0, "bytes": 0, "memory_limit": 1 << 30, "tasks": {}}
    loading = workers(queue="", collator_0="", teacher_0_0="load", trainer_0="load")
    said = status_line(status(step=0, last=None, evaluation=None, queue=empty, workers=loading))
    assert said.endswith("queue 0 samples, waiting for collator-0, teacher-0-0, trainer-0 to load")
    filled = status_line(status(step=0, last=None, workers=loading))
    assert filled.endswith("waiting for teacher-0-0, trainer-0 to load")
    assert "waiting" not in status_line(status(step=0, workers=loading)), "a step was taken since the last look"
    many = workers(**{f"teacher_{number}_0": "load" for number in range(9)}, trainer_0="load")
    assert "teacher-3-0 and 6 more to load" in status_line(status(workers=many))


def test_a_pipe_gets_a_line_for_each_phase_before_the_first_step() -> None:
    out, none = io.StringIO(), {"step": 0, "last": None, "evaluation": None, "queue": None}
    loads, measures = (WORKER | {"phase": "load", "activity": text} for text in ("loading", "measuring the text: {}%"))
    with open_view(True, Console(file=out, width=200)) as view:
        for done in (10, 20):
            checking = f"building the chain tables: {done}%"
            view.show(status(**none | {"step": None, "steps": None}, workers=[], checking=checking))
        for worker in (loads, *(measures | {"activity": measures["activity"].format(done)} for done in (3, 40))):
            view.show(status(**none, workers=[worker]))
        view.show(status(workers=[WORKER | {"activity": "evaluating: 5%"}]))
    assert out.getvalue().splitlines() == [
        "tiny: running, building the chain tables: 10%",
        "tiny: running, step 0/12, waiting for trainer-0 to load",
        "tiny: running, step 0/12, waiting for trainer-0 (measuring the text: 3%) to load",
    ]


def test_a_run_has_the_steps_that_its_file_has_once_it_trains(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(5)), encoding="utf-8")
    curves = Curve(tmp_path / "steps.jsonl"), Curve(tmp_path / "eval.jsonl")
    heard = status(output=tmp_path, last=None)
    assert with_files(heard, *curves).step == 5, "the supervisor has heard of 3"
    loads = status(output=tmp_path, workers=[WORKER | {"phase": "load"}])
    assert with_files(loads, *curves).step == 3, "the lines may be of an earlier start"


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    leaving = workers(collator_0="", teacher_0_0="run", trainer_0="run")
    assert "waiting" not in status_line(status(workers=leaving))
    assert "waiting" not in status_line(status(step=12, workers=workers(collator_0="", trainer_0="")))
    again = [leaving[2], leaving[1] | {"phase": "load", "restarts": 1}]
    assert "waiting for teacher-0-0 to load" in status_line(status(workers=again))


def test_the_picture_cuts_nothing_at_80_columns() -> None:
    last = {"step": 2, "loss": 4.5, "backward_seconds": 0.25, "num_valid_samples_of_teacher_0": 4, "ce_loss": 5.25}
    last |= {f"a_figure_with_a_longer_name_{number}": 0.001234 for number in range(5)}
    names = workers(node1_collator_0="run", node1_teacher_0_0="run", node1_trainer_0="run")
    out = io.StringIO()
    Console(file=out, width=80).print(render_status(status(step=12345, steps=100000, last=last, workers=names), ""))
    said = out.getvalue()
    for text in ("step 12345/100000", "node1-teacher-0-0", "backward_seconds 0.25", "1 s ago"):
        assert text in said, text
    assert all(f"a_figure_with_a_longer_name_{number} 0.001234" in said for number in range(5)), said
    assert "…" not in said and "num_valid_samples_of_teacher_0 4" in said
    assert "restarts" not in said, "a column that is empty"


def test_the_picture_shows_losses_speed_queue_and_workers() -> None:
    out = io.StringIO()
    last = {**(status().last or {}), "seconds": 2.0}
    Console(file=out, width=120).print(render_status(status(last=last), "stopping"))
    for text in (
        "step 3/12, about 18 s left",
        "loss 4.5000",
        "grad_norm 1.5",
        "24 samples, 3.0/1024 MiB",
        "trainer-0",
        "1 s ago",
        "stopping",
    ):
        assert text in out.getvalue(), text


@cases(
    "changes, expected",
    (
        {"state": "completed", "summary": {"trained": 90, "skipped": 6, "dead": 0, "truncated": 2, "positions": 96}},
        "90 trained, 6 skipped, 0 dead, 2 truncated of 96 samples; 2.5000 bits per byte on held-out text; model in",
    ),
    ({"state": "stopped"}, "tiny: stopped after step 3 of 12; rerun to resume from the checkpoint of step 3"),
    ({"state": "stopped", "checkpoint": None}, "there is no checkpoint in /runs/tiny, what was trained is lost"),
    ({"state": "stopped", "checkpoint": None, "step": 0}, "in /runs/tiny, nothing was trained: a rerun starts"),
    ({"state": "stopped", "checkpoint": 2}, "of step 2 in /runs/tiny (1 step after it lost)"),
    ({"state": "failed"}, "tiny: failed after step 3 of 12; logs are in /runs/tiny/logs"),
    ids=["completed", "stopped", "no checkpoint", "nothing trained", "steps lost", "failed"],
)
def test_final_line(changes: dict[str, Any], expected: str) -> None:
    assert expected in final_line(status(**changes))


NO_NUMBERS = {
    "last": {"step": 3, "loss": None, "ce_loss": 5.25, "kl_loss": None, "grad_norm": None, "nonfinite": True,
             "tokens_per_second": None},
    "evaluation": {"step": 0, "bits_per_byte": None},
    "summary": {"trained": 90, "positions": 96},
}  # fmt: skip


def test_metrics_that_are_not_finite_are_left_out() -> None:
    assert status_line(status(**NO_NUMBERS)) == "tiny: running, step 3/12, ce_loss 5.2500, queue 24 samples"
    out = io.StringIO()
    Console(file=out, width=120).print(render_status(status(**NO_NUMBERS), ""))
    assert "ce_loss 5.2500" in out.getvalue() and "grad_norm" not in out.getvalue()
    infinite = status(last={"step": 3, "loss": float("nan"), "tokens_per_second": float("inf")})
    assert status_line(infinite) == "tiny: running, step 3/12, bits per byte 2.5000, queue 24 samples"


@pytest.mark.parametrize("how", ["terminal", "pipe", "json"])
def test_every_view_shows_a_step_without_a_finite_loss(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=how == "terminal", width=120)
    with open_view(True, console, as_json=how == "json") as view:
        view.show(status(**NO_NUMBERS))
        view.end(status(**NO_NUMBERS | {"state": "completed"}))
    said = capsys.readouterr().out if how == "json" else console.file.getvalue()  # type: ignore[attr-defined]
    assert "completed" in said


def test_final_line_names_what_a_stop_has_lost() -> None:
    line = final_line(status(state="stopped", error="trainer-0 did not exit within 2 s"))
    assert "after step 3 of 12: trainer-0 did not exit within 2 s; rerun to resume" in line


class Broken(ProgressView):
    """A view that cannot display anything."""

    def show(self, status: RunStatus) -> None:
        raise TypeError("no number")

    def stopping(self, *, now: bool) -> None:
        raise BrokenPipeError("closed pipe")

    def end(self, status: RunStatus) -> None:
        raise SystemExit(1)


def test_failing_view_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    view = FailsafeView(Broken())
    view.show(status())
    view.stopping(now=False)
    view.end(status(state="stopped"))
    assert caplog.messages == ["the run continues, but cannot be displayed: TypeError: no number"]


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_view_of_a_whole_run(terminal: bool) -> None:
    out = io.StringIO()
    wrong = {"last": {"step": 3, "unreachable_mass_t0": 0.5}}
    with open_view(True, Console(file=out, force_terminal=terminal, width=120)) as view:
        view.show(status(step=0, **wrong))
        view.show(status(step=0))
        view.stopping(now=False)
        view.stopping(now=True)
        view.show(status(state="running", step=1))
        view.end(status(state="stopped", **wrong))
    assert "stopped after step 3 of 12" in out.getvalue()
    if not terminal:
        lines = out.getvalue().splitlines()
        assert len(lines) == 5, "one line for the state, one for each request to stop, one for the end, one that warns"
        assert lines[3] == "Force quit: progress since the last checkpoint is lost"


def test_json_line_on_every_change(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view(True, as_json=True) as view:
        for text_read in (0.1, 0.2):
            view.show(status(state="starting", step=None, steps=None, workers=[], text_read=text_read))
        view.show(status())
        view.show(status())
        view.stopping(now=False)
        view.end(status(state="stopped"))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["state"] for line in found] == ["starting", "running", "stopped"]


def test_text_read_before_the_first_step() -> None:
    reading = status(step=None, steps=None, last=None, evaluation=None, queue=None, workers=[], text_read=0.345)
    assert status_line(reading) == "tiny: running, 34% of the text read"
    out = io.StringIO()
    Console(file=out, width=120).print(render_status(reading, ""))
    assert "34% of the text read" in out.getvalue()


def test_quiet_view_logs_instead_of_printing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="xtoken")
    with open_view(False) as view:
        view.show(status())
        view.end(status(state="stopped", last={"step": 3, "unreachable_mass_t0": 0.5}))
    assert capsys.readouterr().out == ""
    levels = {record.message: record.levelname for record in caplog.records}
    assert levels.pop(status_line(status())) == "INFO" and levels.popitem()[1] == "INFO"
    assert list(levels.values()) == ["WARNING"] and not next(iter(levels)).startswith("warning")


LOADING = WORKER | {"phase": "load", "activity": ""}


def loading_status(**changes: Any) -> RunStatus:
    start = {"step": 0, "steps": 10, "last": None, "evaluation": None, "queue": None, "spec": {"eval": {"every": 4}}}
    return status(**start | {"workers": [LOADING]} | changes)


def test_an_evaluation_is_counted_and_shown() -> None:
    evaluating = LOADING | {"activity": "evaluating: 40%"}
    line = status_line(loading_status(workers=[evaluating]))
    assert "trainer-0 evaluating: 40%" in line and "to load" not in line
    loading = status_line(loading_status(workers=[LOADING | {"activity": "loading the student"}]))
    assert "waiting for trainer-0 (loading the student) to load" in loading
    assert (
        status_line(loading_status(steps=None, state="starting", checking="building tables", workers=[]))
        == "tiny: starting, building tables"
    )


def test_remaining_time_has_steps_and_evaluations() -> None:
    assert loading_status().remaining_s() is None
    evaluated = {"step": 4, "seconds": 30.0}
    assert loading_status(step=5, last={"seconds": 2.0}, evaluation=evaluated).remaining_s() == 5 * 2.0 + 2 * 30.0
    assert loading_status(step=4, evaluation=evaluated).evaluations_left == 2
    assert loading_status().evaluations_left == 4
    assert loading_status(step=10, evaluation={"step": 10}).evaluations_left == 0
    recent = [{"seconds": 1.0}, {"seconds": 3.0}]
    assert loading_status(step=8, spec={}).remaining_s(recent) == 4.0
