"""Parts of the GPU's tests that ran in calls of their own make one report only if they are of the same thing."""

from typing import Any

from benchmarks.gpu_tests import ALONE, ROOT, SIDE_BY_SIDE, WHOLE_RUNS, joined


def report(part: str, **changes: Any) -> dict[str, Any]:
    tests = {f"test_{part}::test_it": "passed", f"test_{part}::test_other": "skipped"}
    return {"gpu": "one", "torch": "2", "kernel_hash": "abc", "parts": [part], "tests": tests, **changes}


def test_a_part_is_added_to_what_the_same_sources_have_shown() -> None:
    first = joined({}, report("ops"))
    both = joined(first, report("runs"))
    assert both["parts"] == ["ops", "runs"]
    assert (both["passed"], both["skipped"], both["failed"]) == (2, 2, 0)
    again = joined(both, report("ops", tests={"test_ops::test_it": "failed"}))
    assert (again["passed"], again["skipped"], again["failed"]) == (1, 2, 1)
    assert joined(first, joined({}, report("runs"))) == both


def test_of_other_sources_or_another_machine_nothing_is_kept() -> None:
    first = joined({}, report("ops"))
    for change in ({"kernel_hash": "def"}, {"gpu": "two"}, {"torch": "3"}):
        found = joined(first, report("runs", **change))
        assert found["parts"] == ["runs"]
        assert set(found["tests"]) == {"test_runs::test_it", "test_runs::test_other"}


def test_every_test_that_takes_a_gpu_belongs_to_a_part() -> None:
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8") and path.name != "test_gpu_results_joined.py"
    ]
    assert len(marked) > 10
    assert [path for path in marked if not path.startswith((*SIDE_BY_SIDE, *ALONE, *WHOLE_RUNS))] == []
