"""The whole run's figures: the page says what the result files say, ratios are of one call, limits hold or fail."""

from __future__ import annotations

import pytest

from benchmarks.end_to_end import page
from benchmarks.end_to_end.bounds import Bound, bounds_of


def test_the_page_is_in_step_with_the_results() -> None:
    assert page.rendered() == page.PAGE.read_text(encoding="utf-8"), "run: python -m benchmarks.end_to_end.page"


def test_a_ratio_is_taken_within_its_own_call() -> None:
    compared = 0
    for call in page.calls().values():
        for variant in call["variants"].values():
            others = {"times_serial": call["serial"].get(variant["serial"]), "times_beside": None}
            if variant.get("beside"):
                others["times_beside"] = call["variants"].get(variant["beside"])
            for name, other in others.items():
                if name in variant:
                    assert other is not None
                    expected = variant["tokens_per_second"] / other["tokens_per_second"]
                    assert variant[name] == pytest.approx(expected)
                    compared += 1
    assert compared


@pytest.mark.parametrize(
    ("found", "must", "aim", "most", "verdict"),
    [
        (2.0, 1.5, 1.8, False, "holds, aim reached"),
        (1.6, 1.5, 1.8, False, "holds"),
        (1.4, 1.5, 1.8, False, "fails"),
        (0.6, 0.5, 0.25, True, "fails"),
        (0.2, 0.5, 0.25, True, "holds, aim reached"),
        (2.0, None, 1.8, False, "aim reached"),
        (1.0, None, 1.8, False, "below its aim"),
        (1.0, None, None, True, ""),
        (None, 1.5, 1.8, False, "not run"),
    ],
)
def test_a_figure_is_held_to_its_limits(
    found: float | None, must: float | None, aim: float | None, most: bool, verdict: str
) -> None:
    assert Bound("x", found, must, aim, most=most).verdict == verdict


def test_memory_counts_the_teacher_and_its_ring_and_needs_the_serial_loop_beside() -> None:
    parts = {"peak_bytes_above_state": 2, "teacher_bytes_above_weights": 1, "ring_bytes": 1}
    call = {
        "serial": {"p_kl": {"peak_bytes_above_state": 10}},
        "variants": {"p_kl_hidden": {"serial": "p_kl", **parts}},
    }
    (share,) = (b.found for b in bounds_of({"one": call}) if "hidden states, activations kept" in b.what)
    assert share == pytest.approx(0.4)
    call["serial"] = {}
    assert all(b.found is None for b in bounds_of({"one": call}) if "hidden states" in b.what)
