"""The queue's benchmark: its workload, its load generator and its bounds."""

import tempfile

import pytest

from benchmarks import pages
from benchmarks.queue import compare, load
from benchmarks.queue.bounds import queue_bounds
from xtoken_core.data_plane.address import Address


def test_a_slower_queue_fails_its_bounds() -> None:
    result = pages.result("queue")
    result["ours"]["ipc_1"]["put"] = 0.5 * result["plain"]["ipc_1"]["put"]
    failed = {bound.what for bound in queue_bounds(result) if not bound.holds}
    assert "put, ipc, 1 in flight, relative to raw pyzmq" in failed


def test_the_ratio_to_another_queue_is_reported_and_not_required() -> None:
    result = pages.result("queue")
    for size in result["transferqueue"]["batch"].values():
        size["get"] *= 100
    bounds = {bound.what: bound for bound in queue_bounds(result)}
    reported = bounds["get, ipc, of TransferQueue"]
    assert reported.holds and reported.must_text == "reported" and reported.value < 1


def test_ratios_of_a_result_grow_with_speed() -> None:
    result = pages.result("queue")
    before = compare.ratios(result)
    for calls in result["ours"].values():
        calls["put"] *= 2
    after = compare.ratios(result)
    changed = {name for name in before if after[name] != pytest.approx(before[name])}
    assert changed and all(name.startswith("put") for name in changed)
    assert all(after[name] == pytest.approx(2 * before[name]) for name in changed)


def test_load_of_two_runs() -> None:
    with tempfile.TemporaryDirectory(prefix="xq-") as name:
        found = load.measure(Address.parse(f"ipc://{name}/q"), 2, 3, 1)
    assert (found["errors"], found["steps_done"]) == ([], 6)


def test_comparison_within_rounds() -> None:
    """A machine that slows down between two rounds changes no ratio."""
    slower = [
        {"commit": {"put": 2.0 * s}, "commit again": {"put": 2.2 * s}, "here": {"put": 1.0 * s}} for s in (1, 2, 9)
    ]
    row = compare.compared(slower)[0]
    assert (row["what"], row["of_commit"]) == ("put", 0.5)
    assert row["of_itself"] == pytest.approx(1.1)
    assert len(row["rounds"]["of_commit"]) == 3
