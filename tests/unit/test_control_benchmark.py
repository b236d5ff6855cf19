"""The control plane's figures in the documents are those of the result file."""

from __future__ import annotations

import json

import pytest

from benchmarks.control import page
from benchmarks.control import readers as control_readers


def test_the_page_is_in_step_with_the_result() -> None:
    assert page.rendered() == page.PAGE.read_text(encoding="utf-8"), "run: python -m benchmarks.control.page"


def test_a_bound_that_is_missed_is_said() -> None:
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    load = {"requests": 900, "failed": 0, "p50_ms": 1.0, "p99_ms": 9.0, "control_core_share": 0.05}
    readers = {
        "readers": 200, "every_s": 2.0, "steps": 850, "alone_s": [10.0, 10.2], "read_s": [10.5, 10.7],
        "slower": 0.0495, "spread_alone": 0.02, "load": [load, load], "machine": "two cores",
    }  # fmt: skip
    told = page.figures(result | {"readers": readers})
    assert "| training with readers | 10.60 s | 10.50, 10.70 |" in told
    assert "| training slowed by readers, share, by runs | 0.0495 | at most 0.03 | fails |" in told
    assert "the control plane took 5.0 to 5.0 % of its core" in told


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
