"""The queue's benchmark: its workload, its load generator and its bounds."""

import tempfile

from benchmarks import pages
from benchmarks.queue import load
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


def test_load_of_two_runs() -> None:
    with tempfile.TemporaryDirectory(prefix="xq-") as name:
        found = load.measure(Address.parse(f"ipc://{name}/q"), 2, 3, 1)
    assert (found["errors"], found["steps_done"]) == ([], 6)
