"""Figures of the on-policy benchmark: rates behind the warm-up, ratios of both sides."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.end_to_end import mps
from benchmarks.on_policy import __main__ as both
from benchmarks.on_policy import ours, report, trl_gold


def step(number: int, *, seconds: float = 0.5, wait: float = 0.2) -> dict[str, float]:
    return {
        "time": number * seconds, "seconds": seconds, "data_wait": wait, "teacher_wait": 0.1, "rollout_wait": 0.3,
        "completions": 8, "completion_tokens": 25.0, "generated_tokens_per_second": 900.0, "finished": 0.5,
        "staleness": 1.0, "memory_peak_bytes": 7,
    }  # fmt: skip


def test_rates_count_the_steps_behind_the_warm_up() -> None:
    slow = [step(n, seconds=9.0) for n in range(1 - ours.WARM_UP, 1)]
    row = ours.result([*slow, *(step(n) for n in range(1, 11))])
    assert row["steps"] == 10
    assert row["seconds_per_step"] == pytest.approx(0.5)
    assert row["tokens_per_second"] == pytest.approx(400)
    assert row["trained_tokens_per_second"] == pytest.approx(500)
    assert row["waits"] == {"data_wait": 0.2, "teacher_wait": 0.1, "rollout_wait": 0.3}


def test_both_sides_are_compared_at_equal_and_at_their_best_batches() -> None:
    def side(**rates: float) -> list[dict[str, float]]:
        return [
            {"batch": int(name[1:]), "tokens_per_second": rate, "generated_tokens_per_second": 2 * rate}
            for name, rate in rates.items()
        ]

    assert report.variables({}) == {"r": None}
    made = report.variables({"ours": side(b16=130, b64=500), "trl": side(b16=100, b64=150, b128=90)})
    assert made["ratios"] == [(16, pytest.approx(1.3)), (64, pytest.approx(500 / 150))]
    assert made["best_ratio"] == pytest.approx(500 / 150)
    assert made["over_generation"] == pytest.approx(500 / 300)
    assert made["ended"] == []
    assert made["holds"]
    assert [(name, row["batch"]) for name, row in made["rows"]] == [
        ("this package", 16), ("this package", 64), ("TRL", 16), ("TRL", 64), ("TRL", 128),
    ]  # fmt: skip
    assert not report.variables({"ours": side(b16=110, b64=500), "trl": side(b16=100)})["holds"]


def test_bounds_are_those_of_the_least_ratio() -> None:
    assert [bound.verdict for bound in report.bounds({})] == ["not run", "not run"]
    sides = {
        "ours": [{"batch": 16, "tokens_per_second": 119}, {"batch": 64, "tokens_per_second": 300}],
        "trl": [
            {"batch": 16, "tokens_per_second": 100, "generated_tokens_per_second": 110},
            {"batch": 64, "tokens_per_second": 150, "generated_tokens_per_second": 160},
        ],
    }
    assert [bound.verdict for bound in report.bounds(sides)] == ["holds", "fails"]


@pytest.mark.parametrize(("count", "warm_up", "seconds"), [(2, 1, 8.0), (3, 2, 2.0), (4, 2, 2.0)])
def test_a_slow_run_of_trl_has_figures_from_its_second_step(count: int, warm_up: int, seconds: float) -> None:
    times = [0.0, 8.0, 10.0, 12.0][:count]
    steps = [{"time": time, "generation": seconds / 4, "forward": 0.1, "backward": 0.2} for time in times]
    counts = [{"completion_tokens": 100, "finished": 0.5} for _ in times]
    row = trl_gold.result(steps, counts, Namespace(batch=4, new_tokens=25))
    assert (row["warm_up"], row["steps"]) == (warm_up, count - warm_up)
    assert row["seconds_per_step"] == pytest.approx(seconds)
    assert row["tokens_per_second"] == pytest.approx(100 / seconds)
    assert row["generated_tokens_per_second"] == pytest.approx(400 / seconds)
    sides = {"ours": [{"batch": 4, "tokens_per_second": 9.0}], "trl": [row]}
    assert report.variables(sides)["rows"][1][0] == ("TRL" if count > 2 else "TRL, its second step alone")


def test_a_run_of_trl_that_ended_early_says_why() -> None:
    log = "{'loss': 1.0}\nTraceback\n  File\ntorch.AcceleratorError: CUDA error: assert\nSearch\n"
    assert both.why_ended(log) == "torch.AcceleratorError: CUDA error: assert"
    assert both.why_ended("{'loss': 1.0}\n") == "out of time"
    row = {"batch": 4, "tokens_per_second": 1.0, "generated_tokens_per_second": 2.0, "ended": "out of time"}
    sides = {"ours": [{"batch": 4, "tokens_per_second": 9.0}], "trl": [row]}
    assert report.variables(sides)["ended"] == [row]


def test_a_run_of_trl_with_one_step_has_no_figures() -> None:
    row = trl_gold.result(
        [{"time": 3.0}], [{"completion_tokens": 9, "finished": 1.0}], Namespace(batch=4, new_tokens=9)
    )
    assert row["steps"] == 0 and "tokens_per_second" not in row


def test_parts_that_the_bounds_are_about_are_measured_first() -> None:
    options = Namespace(equal=16, ours=[64, 256], trl=[64, 128], parts=list(both.PARTS))
    plan = both.planned(options)
    assert plan[:6] == [("ours", 64), ("trl", 16), ("ours", 16), ("trl", 64), ("trl", 128), ("ours", 256)]
    assert {part for part, _ in plan} == set(both.PARTS)
    options.parts = ["trl"]
    assert both.planned(options) == [("trl", 16), ("trl", 64), ("trl", 128)]


def test_nothing_begins_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Namespace(equal=16, ours=[64], trl=[64], parts=list(both.PARTS), part_seconds=60.0)
    monkeypatch.setattr(both, "_stage", lambda part, size, options, seconds: [{"part": part, "seconds": seconds}])
    seconds = iter([200.0, 200.0, 29.0, 50.0, 50.0, 29.0, 14.0, 16.0])
    made = [(part, rows[0]["seconds"]) for part, rows in both.stages(options, lambda: next(seconds, 0.0))]
    assert made == [("ours", 60.0), ("ours", 50.0)]


def test_an_mps_daemon_is_found_by_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps.serves_this_process()
    (tmp_path / "control").touch()
    assert mps.serves_this_process()
