"""The figures of alignment, collation and projection: the page says what the result files say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import collate_page


def _results() -> tuple[dict[str, Any], dict[str, Any]]:
    result = json.loads(collate_page.RESULT.read_text(encoding="utf-8"))
    return result, json.loads(collate_page.WORKERS.read_text(encoding="utf-8"))


def test_the_page_is_in_step_with_the_results() -> None:
    assert collate_page.rendered() == collate_page.PAGE.read_text(encoding="utf-8"), (
        "run: python -m benchmarks.collate_page"
    )


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
    found = {what: holds for what, _, _, holds in collate_page.bounds(result, workers)}
    assert not found["align only, M student tokens/s"]
