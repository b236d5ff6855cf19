"""The control plane's figures in the documents are those of the result file."""

from __future__ import annotations

import json

from benchmarks import control_page as page


def test_the_page_is_in_step_with_the_result() -> None:
    assert page.rendered() == page.PAGE.read_text(encoding="utf-8"), "run: python -m benchmarks.control_page"


def test_a_bound_that_is_missed_is_said() -> None:
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    load = {"requests": 900, "failed": 0, "p50_ms": 1.0, "p99_ms": 9.0, "control_core_share": 0.05}
    readers = {
        "readers": 200, "every_s": 2.0, "streams": 50, "steps": 850, "alone_s": [10.0, 10.2], "read_s": [10.5, 10.7],
        "slower": 0.0495, "spread_alone": 0.02, "load": [load, load],
    }  # fmt: skip
    told = page.figures(result | {"readers": readers})
    assert "| training with readers | 10.60 s | 10.50, 10.70 |" in told
    assert "| training slowed by readers, share | 0.0495 | at most 0.03 | fails |" in told
    assert "the control plane took 5.0 to 5.0 % of its core" in told
