"""The benchmark of alignment, collation and projection: its cases and its bounds."""

from typing import Any

import pytest

from benchmarks import pages
from benchmarks.bounds import collation_bounds


def _results() -> tuple[dict[str, Any], dict[str, Any]]:
    return pages.result("collate"), pages.result("collate_workers")


def test_every_pair_text_and_length_is_there_once() -> None:
    result, _ = _results()
    for part in ("align", "collator"):
        keys = [(row["pair"], row["corpus"], row["cap"]) for row in result[part]]
        assert len(set(keys)) == len(keys) == 2 * 3 * 3
        assert {cap for _, _, cap in keys} == {512, 2048, 8192}


@pytest.mark.parametrize("row", range(2))
def test_one_slow_row_fails_its_bound(row: int) -> None:
    result, workers = _results()
    result["align"][row]["student_tokens_per_s"] = 7.9e6
    holds = {bound.what: bound.holds for bound in collation_bounds(result, workers)}
    assert not holds["alignment alone, million student tokens/s"]
