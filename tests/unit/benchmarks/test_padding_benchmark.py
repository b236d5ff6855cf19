"""The figures of padding follow from the plan: anybody gets them again."""

from __future__ import annotations

import pytest

from benchmarks import pages
from benchmarks.bounds import padding_bounds
from benchmarks.padding import BUDGETS, SAMPLES, measured


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_the_file_has_the_plans_own_figures(form: str) -> None:
    result = pages.result("padding")
    rows = {(row["samples"], row["budget"]): row for row in result["rows"]}
    assert set(rows) == {(samples, budget) for samples in SAMPLES for budget in BUDGETS}
    settings = {"steps": result["steps"], "seed": result["seed"]}
    found = measured("chat", 16, 32768, packed=form == "packed", **settings)
    assert found == pytest.approx(rows[16, 32768]["chat"][form])


def test_packed_rows_keep_their_bounds() -> None:
    assert all(bound.holds for bound in padding_bounds(pages.result("padding")))
