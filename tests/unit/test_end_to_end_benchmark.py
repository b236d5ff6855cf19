"""The whole run's figures: the page says what the result file says, and a ratio is that of its own call."""

from __future__ import annotations

import json

import pytest

from benchmarks.end_to_end import page


def test_the_page_is_in_step_with_the_result() -> None:
    assert page.rendered() == page.PAGE.read_text(encoding="utf-8"), "run: python -m benchmarks.end_to_end.page"


def test_a_ratio_is_taken_from_the_serial_loop_of_the_same_call() -> None:
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    compared = [variant for variant in result["variants"].values() if "times_serial" in variant]
    assert compared
    for variant in compared:
        serial = result["serial"][variant["serial"]]
        assert variant["times_serial"] == pytest.approx(variant["tokens_per_second"] / serial["tokens_per_second"])
