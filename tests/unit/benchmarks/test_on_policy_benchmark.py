"""Figures of the on-policy benchmark: rates behind the warm-up, ratios of both sides."""

import pytest

from benchmarks.on_policy import ours, report


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
    assert made["ended"] == []
    assert [(name, row["batch"]) for name, row in made["rows"]] == [
        ("this package", 16), ("this package", 64), ("TRL", 16), ("TRL", 64), ("TRL", 128),
    ]  # fmt: skip


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
