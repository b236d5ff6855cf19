"""The order of training: a permutation per epoch."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xtoken_core.dataset import record_at


@examples(20, 60)
@given(records=st.integers(1, 700), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_every_epoch_holds_each_record_once(records: int, seed: int, epoch: int) -> None:
    order = [record_at(epoch * records + i, records=records, seed=seed, shuffle=True) for i in range(records)]
    assert sorted(order) == list(range(records))


@examples(50, 200)
@given(records=st.integers(1, 2**45), position=st.integers(0, 2**60), seed=st.integers(0, 2**63 - 1))
def test_large_data_stays_in_range(records: int, position: int, seed: int) -> None:
    assert 0 <= record_at(position, records=records, seed=seed, shuffle=True) < records


@pytest.mark.parametrize("records", [2, 3, 4])
def test_every_permutation_of_few_records_is_about_equally_frequent(records: int) -> None:
    seeds = 6000
    seen = Counter(
        tuple(record_at(p, records=records, seed=seed, shuffle=True) for p in range(records)) for seed in range(seeds)
    )
    every = list(permutations(range(records)))
    expected = seeds / len(every)
    chi_squared = sum((seen[order] - expected) ** 2 / expected for order in every)
    assert chi_squared < 3 * len(every)  # mean len - 1; the chance of exceeding this is below 1e-2 to 1e-5
    assert set(seen) == set(every)


def test_neighbours_do_not_stay_neighbours() -> None:
    records = 5000
    order = [record_at(p, records=records, seed=3, shuffle=True) for p in range(records)]
    mean_step = sum(abs(a - b) for a, b in pairwise(order)) / (records - 1)
    assert records / 3 * 0.95 < mean_step < records / 3 * 1.05


def test_epochs_and_seeds_differ_and_repeat_exactly() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return [record_at(number * 50 + i, records=50, seed=seed, shuffle=True) for i in range(50)]

    assert len({tuple(epoch(n, seed)) for n in range(4) for seed in (0, 1, 2)}) == 12
    assert epoch(2, 1) == epoch(2, 1)


GOLDEN = [8, 3, 4, 6, 1, 2, 7, 9, 0, 5, 0, 5, 8, 9, 6, 2, 1, 3, 7, 4]


def test_the_order_is_part_of_a_checkpoint_and_must_never_change() -> None:
    assert [record_at(p, records=10, seed=7, shuffle=True) for p in range(20)] == GOLDEN


def test_unshuffled_epochs_keep_the_order_of_the_data() -> None:
    assert [record_at(p, records=3, seed=9, shuffle=False) for p in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("position", "records"), [(-1, 5), (0, 0)])
def test_impossible_positions_are_refused(position: int, records: int) -> None:
    with pytest.raises(ValueError, match="no record stands at position"):
        record_at(position, records=records, seed=0, shuffle=True)
