"""IntervalSet against a plain set."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xtoken_core.queue.intervals import IntervalSet

SPANS = st.lists(st.tuples(st.integers(-5, 40), st.integers(-3, 8)), max_size=25)


def filled(spans: list[tuple[int, int]]) -> tuple[IntervalSet, set[int]]:
    intervals, plain = IntervalSet(), set()
    for start, length in spans:
        intervals.add(start, start + length)
        plain.update(range(start, start + length))
    return intervals, plain


@examples(50, 200)
@given(SPANS)
def test_it_holds_what_a_set_holds(spans: list[tuple[int, int]]) -> None:
    intervals, plain = filled(spans)
    assert len(intervals) == len(plain)
    assert {p for p in range(-10, 60) if p in intervals} == plain
    assert {p for start, stop in intervals.intervals() for p in range(start, stop)} == plain


@examples(50, 200)
@given(SPANS)
def test_runs_are_ascending_and_never_touch(spans: list[tuple[int, int]]) -> None:
    runs = list(filled(spans)[0].intervals())
    assert all(start < stop for start, stop in runs)
    assert all(left[1] < right[0] for left, right in pairwise(runs))


@examples(50, 200)
@given(SPANS, st.integers(-10, 60))
def test_first_gap_is_the_lowest_integer_that_is_missing(spans: list[tuple[int, int]], start: int) -> None:
    intervals, plain = filled(spans)
    gap = start
    while gap in plain:
        gap += 1
    assert intervals.first_gap(start) == gap


def test_add_one_integer() -> None:
    intervals = IntervalSet()
    for value in (3, 5, 4):
        intervals.add(value)
    assert list(intervals.intervals()) == [(3, 6)]
