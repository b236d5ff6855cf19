"""The number of prompts of each step: none in a cold start, then in a straight line from the first to the last."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import cases
from xtoken_core.prompt_plan import PromptPlan, floor_sum


@cases(
    "after, first, last, unit, expected",
    (0, 0, 0, 1, [0, 0, 0, 0, 0, 0]),
    (0, 8, 8, 4, [8, 8, 8, 8, 8, 8]),
    (2, 4, 4, 4, [0, 0, 4, 4, 4, 4]),
    (1, 2, 8, 2, [0, 2, 4, 6, 6, 8]),
    (1, 8, 2, 2, [0, 8, 6, 6, 4, 2]),
    (3, 4, 8, 4, [0, 0, 0, 4, 8, 8]),
    (4, 4, 8, 4, [0, 0, 0, 0, 4, 8]),
    (5, 4, 8, 4, [0, 0, 0, 0, 0, 4]),
)
def test_the_prompts_of_each_step(after: int, first: int, last: int, unit: int, expected: list[int]) -> None:
    plan = PromptPlan(8, 6, after, first, last, unit)
    assert [plan.at(step) for step in range(6)] == expected
    held = [[index for index in range(8) if plan.holds(step * 8 + index)] for step in range(6)]
    assert held == [list(range(8 - count, 8)) for count in expected], "the last ones of the step"


@given(
    unit=st.integers(1, 16),
    parts=st.integers(1, 8),
    ends=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    steps=st.integers(1, 10**6),
    data=st.data(),
)
def test_prompts_are_whole_units_next_to_the_line(
    unit: int, parts: int, ends: tuple[int, int], steps: int, data: st.DataObject
) -> None:
    first, last = (min(end, parts) * unit for end in ends)
    after, step = data.draw(st.integers(0, steps - 1)), data.draw(st.integers(0, steps - 1))
    plan = PromptPlan(parts * unit, steps, after, first, last, unit)
    assert plan.at(after) == first and (after == steps - 1 or plan.at(steps - 1) == last)
    if step < after:
        assert plan.at(step) == 0
        return
    line = first + (last - first) * Fraction(step - after, max(steps - 1 - after, 1))
    assert plan.at(step) % unit == 0 and abs(plan.at(step) - line) <= Fraction(unit, 2)


@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 300), st.integers(0, 300))
def test_the_prompts_before_a_step_are_the_sum(steps: int, units: int, after: int, step: int) -> None:
    plan = PromptPlan(120, steps, min(after, steps - 1), 3 * units, 120 - 3 * units, 3)
    assert plan.before(min(step, steps)) == sum(plan.at(each) for each in range(min(step, steps)))


@given(st.integers(0, 60), st.integers(1, 50), st.integers(-99, 99), st.integers(-99, 99))
def test_a_sum_of_rounded_quotients(count: int, divisor: int, factor: int, offset: int) -> None:
    assert floor_sum(count, divisor, factor, offset) == sum((factor * i + offset) // divisor for i in range(count))
