"""The order of a build that adds to a store: the stored records first, then only those that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_services.common.stores import build_order
from xtoken_services.common.stores.build_order import stored_first
from xtoken_services.common.text.run_order import record_of

PER_STEP = 8


def records(run: ResolvedRun) -> list[int]:
    """The records that a run reads, in its order."""
    return [record_of(run, position) for position in range(run.positions)]


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_the_missing_records_alone_follow_whole_steps_of_stored_ones(case: tuple[int, set[int]]) -> None:
    count, missing = case
    run = resolved_run(Path("/none"), positions=count)
    before = records(run)
    built = stored_first(run, sorted(missing))
    stored = (count - len(missing)) // PER_STEP * PER_STEP
    assert records(built) == [n for n in before if n not in missing][:stored] + [n for n in before if n in missing]
    assert parse_resolved_run(built.model_dump_json().encode(), source="here") == built


@pytest.mark.parametrize(
    ("stored", "spans"), [(0, 0), (16, 0), (17, 2), (32, 0)], ids=["none", "whole steps", "part of a step", "all"]
)
def test_a_store_without_a_gap_keeps_the_order_of_the_text(tmp_path: Path, stored: int, spans: int) -> None:
    run = resolved_run(tmp_path, positions=32)
    assert len(stored_first(run, records(run)[stored:]).order) == spans


def test_the_records_between_the_closest_gaps_are_computed_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_order, "MOST_SPANS", 4)
    run = resolved_run(tmp_path, positions=40)
    before = records(run)
    missing = [10, 12, 20, 21, 30, 39]
    built = stored_first(run, [before[position] for position in missing])
    assert built.positions == 39, "7 of 40 are computed: 32 of the other 33 fill 4 steps"
    assert records(built)[-7:] == [before[position] for position in (10, 11, 12, 20, 21, 30, 39)]
