"""The control plane's benchmark: its bounds and its comparison of neighbouring windows."""

import pytest

from benchmarks import pages
from benchmarks.bounds import control_bounds
from benchmarks.control import readers as control_readers


def test_a_missed_bound_is_stated() -> None:
    result = pages.result("control")
    (bound,) = (b for b in control_bounds(result | {"windows": {"slower": 0.0495}}) if "slow-down" in b.what)
    assert (bound.value_text, bound.must_text, bound.verdict) == ("0.0495", "≤0.03", "fails")


def test_a_window_is_held_against_its_neighbours() -> None:
    """The machine slows down all the time; readers cost a tenth."""
    spans = [(6.0 + 12 * number, 12.0 + 12 * number) for number in range(20)]
    rows, now = [], 0.0
    while now < spans[-1][1] + 6:
        read = any(began <= now < ended for began, ended in spans)
        seconds = 0.02 * (1 + now / 240) * (1.1 if read else 1.0)
        now += seconds
        rows.append({"time": now, "seconds": seconds})
    found = control_readers.windows(rows, spans)
    assert found["slower"] == pytest.approx(0.1, abs=0.002)
    assert found["interval"][0] <= found["slower"] <= found["interval"][1]
    assert len(found["alone_s"]) == len(found["read_s"]) + 1 == 21
