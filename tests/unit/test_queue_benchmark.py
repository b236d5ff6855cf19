"""The queue's figures: the page says what the result file says, and that file's bounds follow from its figures."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks.queue import page, workload
from benchmarks.queue.bounds import bounds


def test_the_page_is_in_step_with_the_result() -> None:
    assert page.rendered() == page.PAGE.read_text(encoding="utf-8"), "run: python -m benchmarks.queue.page"


def test_the_bounds_follow_from_the_figures() -> None:
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    recomputed = bounds(result)
    assert [bound["what"] for bound in recomputed] == [bound["what"] for bound in result["bounds"]]
    for written, now in zip(result["bounds"], recomputed, strict=True):
        assert written["value"] == pytest.approx(now["value"], rel=2e-3)
        assert written["limit"] == now["limit"]


def test_a_batch_is_the_workload() -> None:
    columns = workload.batch()
    assert set(columns) == set(workload.FIELDS)
    for name in workload.JAGGED:
        offsets = columns[name].offsets
        assert offsets is not None
        lengths = [stop - start for start, stop in itertools.pairwise(offsets)]
        assert len(lengths) == workload.BATCH
        assert workload.SHORTEST <= min(lengths) <= max(lengths) <= workload.LONGEST
    assert len(workload.buffers_of(columns)) == 9


def test_all_batches_are_moved_once_whatever_is_in_flight() -> None:
    moved: list[int] = []
    assert workload.rate(moved.append, in_flight=3, batches=20) > 0
    assert sorted(moved) == list(range(20))


def test_a_failure_in_flight_ends_the_measurement() -> None:
    def fail(number: int) -> None:
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        workload.rate(fail, in_flight=1, batches=3)
