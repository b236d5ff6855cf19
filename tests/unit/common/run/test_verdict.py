"""Verdicts on paired differences of held-out results."""

import math

import pytest

from tests.support.evaluations import SIZES, measured
from xtoken_services.common.run.verdict import Difference, Verdict, difference


def test_what_both_results_have_in_common_is_no_error_of_their_difference() -> None:
    found = difference(measured(1.5, apart=0.5), measured(1.7, apart=0.5))
    assert found is not None and found.verdict is Verdict.BETTER
    assert found.error == pytest.approx(0, abs=1e-9), "documents are equally hard for both"


def test_a_difference_that_documents_do_not_agree_on_is_none() -> None:
    found = difference(measured(1.5, apart=0.5), measured(1.7))
    assert found is not None and found.verdict is Verdict.SAME
    expected = math.sqrt(4 / 3 * sum((0.5 * size) ** 2 for size in SIZES)) / sum(SIZES)
    assert found.error == pytest.approx(expected) and "two standard errors" in str(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"group_bytes": [1800], "group_nats": [1900.0]},
        {"group_bytes": [*SIZES[1:], 1]},
        {"group_nats": None},
        {"group_nats": ["a", "b", "c", "d"]},
        {"group_nats": [1.0]},
    ],
    ids=["one document", "other documents", "none recorded", "text", "too few"],
)
def test_without_the_same_documents_nothing_is_better(changes: dict[str, object]) -> None:
    other = measured(1.7) | changes
    mine = measured(1.5) | (changes if changes.get("group_bytes") == [1800] else {})
    found = difference(mine, other)
    assert found == Difference(pytest.approx(-0.2)) and found.verdict is Verdict.SAME
    assert "two documents or more" in str(found)


def test_a_line_without_a_result_differs_from_nothing() -> None:
    assert difference(measured(None), measured(1.0)) is None
