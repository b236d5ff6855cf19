"""The plan of a step: which rank computes which rows in which micro-batch."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import cases
from tests.support.examples import examples
from xtoken_core.errors import ConfigError
from xtoken_core.plan import MicroBatch, RowLengths, plan, window_positions

MAX_WIDTHS = (64, 96, 40)
windows = st.lists(st.tuples(*(st.integers(0, width) for width in MAX_WIDTHS)), max_size=40).map(
    lambda lengths: [RowLengths(100 + i, row) for i, row in enumerate(lengths)]
)
budgets = st.integers(96, 800)


def rows_of(*lengths):
    return [RowLengths(i, (length,)) for i, length in enumerate(lengths)]


@given(windows, st.integers(1, 5), budgets, st.sampled_from([1, 4, 8]))
@examples(37, 150)
def test_every_row_once_within_the_budget_and_the_same_count_per_rank(rows, ranks, budget, multiple):
    made = plan(rows, ranks=ranks, token_budget=budget, pad_multiple=multiple, max_widths=MAX_WIDTHS)
    assert len(made.ranks) == ranks
    assert {len(own) for own in made.ranks} == {made.micro_batches}
    batches = [batch for own in made.ranks for batch in own]
    assert sorted(i for batch in batches for i in batch.ids) == [row.id for row in rows]
    lengths = {row.id: row.lengths for row in rows}
    for batch in batches:
        if not batch.ids:
            assert batch.widths == (0, 0, 0)
            continue
        for side, width in enumerate(batch.widths):
            longest = max(lengths[i][side] for i in batch.ids)
            assert longest <= width < max(longest, 1) + multiple and width % multiple == 0
            assert width <= MAX_WIDTHS[side] and len(batch.ids) * width <= budget
    for own in made.ranks:
        filled = [bool(batch.ids) for batch in own]
        assert filled == sorted(filled, reverse=True)


@given(windows, st.integers(1, 5), budgets, st.randoms(use_true_random=False))
@examples(20, 50)
def test_the_order_of_the_rows_does_not_matter(rows, ranks, budget, rng):
    shuffled = rng.sample(rows, len(rows))
    arguments = {"ranks": ranks, "token_budget": budget, "max_widths": MAX_WIDTHS}
    assert plan(rows, **arguments) == plan(shuffled, **arguments)


@given(windows, st.integers(1, 5), budgets)
@examples(25, 100)
def test_ranks_differ_by_at_most_one_micro_batch(rows, ranks, budget):
    made = plan(rows, ranks=ranks, token_budget=budget, max_widths=MAX_WIDTHS)
    loads = [sum(batch.padded_tokens for batch in own) for own in made.ranks]
    dearest = max((batch.padded_tokens for own in made.ranks for batch in own), default=0)
    assert max(loads) - min(loads) <= dearest


@given(windows, st.integers(1, 4), budgets, st.integers(0, 3))
@examples(20, 50)
def test_a_larger_count_only_adds_empty_micro_batches(rows, ranks, budget, more):
    arguments = {"ranks": ranks, "token_budget": budget, "max_widths": MAX_WIDTHS}
    small = plan(rows, **arguments)
    large = small.filled_up(small.micro_batches + more, sides=len(MAX_WIDTHS))
    assert large.micro_batches == small.micro_batches + more
    for a, b in zip(small.ranks, large.ranks, strict=True):
        assert b[: len(a)] == a and all(not batch.ids for batch in b[len(a) :])


@given(windows, st.integers(1, 5), budgets, st.sampled_from([1, 4, 8]), st.randoms(use_true_random=False))
@examples(20, 60)
def test_packed_rows_keep_the_budget_and_pad_only_their_sum(rows, ranks, budget, multiple, rng):
    arguments = {"ranks": ranks, "token_budget": budget, "pad_multiple": multiple, "max_widths": MAX_WIDTHS}
    made = plan(rows, **arguments, packed=True)
    assert made == plan(rng.sample(rows, len(rows)), **arguments, packed=True)
    assert {len(own) for own in made.ranks} == {made.micro_batches}
    batches = [batch for own in made.ranks for batch in own]
    assert sorted(i for batch in batches for i in batch.ids) == [row.id for row in rows]
    lengths = {row.id: row.lengths for row in rows}
    for batch in filter(lambda batch: batch.ids, batches):
        assert batch.packed and batch.rows == 1 and list(batch.ids) == sorted(batch.ids)
        for side, width in enumerate(batch.widths):
            total = sum(lengths[i][side] for i in batch.ids)
            assert total <= width < max(total, 1) + multiple and width % multiple == 0 and width <= budget
    loads = [sum(batch.padded_tokens for batch in own) for own in made.ranks]
    assert max(loads) - min(loads) <= max((batch.padded_tokens for batch in batches), default=0)


@given(windows, st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 8]))
@examples(20, 40)
def test_packed_micro_batches_are_bounded_by_rows_of_full_length(rows, ranks, per_batch, multiple):
    longest = max(MAX_WIDTHS)
    arguments = {"ranks": ranks, "token_budget": per_batch * longest, "pad_multiple": multiple}
    made = plan(rows, **arguments, max_widths=MAX_WIDTHS, packed=True)
    assert made.micro_batches <= -(-len(rows) // (per_batch * ranks))


@cases(
    "count, mean, spread, ranks, packed, padding",
    pytest.param(256, 6.3, 0.8, 8, False, 1.25, id="padded"),
    pytest.param(128, 6.0, 1.0, 4, True, 1.01, id="packed"),
)
def test_realistic_lengths_are_balanced(count, mean, spread, ranks, packed, padding):
    rng = random.Random(0)
    drawn = [min(2048, int(rng.lognormvariate(mean, spread)) + 1) for _ in range(count)]
    rows = [RowLengths(i, (n, min(2048, int(n * 1.1)))) for i, n in enumerate(drawn)]
    made = plan(rows, ranks=ranks, token_budget=64 * count, max_widths=(2048, 2048), packed=packed)
    loads = [sum(batch.padded_tokens for batch in own) for own in made.ranks]
    assert max(loads) <= 1.1 * min(loads)
    assert sum(loads) <= padding * sum(sum(row.lengths) for row in rows)


def test_rows_are_spread_over_all_ranks_although_one_could_hold_them():
    made = plan(rows_of(8, 8, 8, 8), ranks=4, token_budget=64, max_widths=(16,))
    assert [own[0].ids for own in made.ranks] == [(0,), (1,), (2,), (3,)]


def test_as_few_micro_batches_as_the_budget_allows():
    made = plan(rows_of(*[8] * 16), ranks=2, token_budget=32, max_widths=(8,))
    assert made.micro_batches == 2
    assert all(len(batch.ids) == 4 for own in made.ranks for batch in own)


def test_long_and_short_rows_are_kept_apart():
    lengths = [64, 8] * 8
    made = plan(rows_of(*lengths), ranks=1, token_budget=512, max_widths=(64,))
    padded = sum(batch.padded_tokens for batch in made.ranks[0])
    assert padded == sum(lengths) and made.micro_batches == 2


def test_the_costliest_micro_batch_goes_to_the_rank_with_the_least_load():
    made = plan(rows_of(40, 30, 26, 21), ranks=2, token_budget=40, pad_multiple=1, max_widths=(40,))
    assert [[batch.padded_tokens for batch in own] for own in made.ranks] == [[40, 21], [30, 26]]


def test_packed_rows_go_to_the_emptiest_micro_batch():
    made = plan(rows_of(1, 0), ranks=2, token_budget=8, pad_multiple=1, max_widths=(8,), packed=True)
    assert [[batch.ids for batch in own] for own in made.ranks] == [[(0,)], [(1,)]]


@cases(
    "lengths, sides, batches",
    pytest.param([(6,), (6,), (6,), (6,), (4,)], 1, 4, id="one more than the sum asks for"),
    pytest.param([(9, 3), (1, 9), (1, 5), (2, 1)], 2, 2, id="without room for one row, with room for the next"),
)
def test_packed_rows_fill_the_fewest_micro_batches(lengths, sides, batches):
    rows = [RowLengths(number, row) for number, row in enumerate(lengths)]
    made = plan(rows, ranks=1, token_budget=10, pad_multiple=1, max_widths=(10,) * sides, packed=True)
    assert len(made.ranks[0]) == batches


def test_a_single_node_group_owns_the_whole_window():
    assert window_positions(2, samples_per_step=4, positions=100) == range(8, 12)


def test_an_empty_window_has_no_micro_batches_unless_others_do():
    assert plan([], ranks=3, token_budget=64, max_widths=(8,)).ranks == ((), (), ())
    empty = MicroBatch((), (0,))
    assert plan([], ranks=2, token_budget=64, max_widths=(8,)).filled_up(1, sides=1).ranks == ((empty,), (empty,))


def test_a_row_wider_than_the_budget_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"sample 7 is 56 tokens wide on the teacher's side.*micro_batch_tokens = 50"):
        plan([RowLengths(7, (10, 50))], ranks=1, token_budget=50, max_widths=(64, 64))


def test_a_row_longer_than_its_context_is_refused():
    with pytest.raises(
        ConfigError, match="sample 7 has 65 tokens on the student's side, whose context length allows 64"
    ):
        plan([RowLengths(7, (65,))], ranks=1, token_budget=512, max_widths=(64,))


@cases(
    "rows, arguments",
    ([RowLengths(1, (8,)), RowLengths(1, (8,))], {}),
    ([RowLengths(1, (8, 8))], {}),
    ([RowLengths(1, (8,))], {"max_widths": (12,)}),
    ([RowLengths(1, (8,))], {"ranks": 0}),
    ids=["twice", "sides", "not a multiple", "no ranks"],
)
def test_what_makes_no_plan_is_refused(rows, arguments):
    with pytest.raises(ValueError):
        plan(rows, **{"ranks": 1, "token_budget": 64, "max_widths": (8,), **arguments})


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 5))
@examples(25, 100)
def test_windows_of_all_groups_cover_every_position_once(samples, positions, groups):
    seen = []
    for step in range(-(-positions // samples) + 1):
        for group in range(groups):
            window = window_positions(step, samples_per_step=samples, positions=positions, group=group, groups=groups)
            assert all(position // samples == step for position in window)
            seen += window
    assert seen == list(range(positions))


def test_a_window_that_cannot_be_is_refused():
    assert window_positions(3, samples_per_step=4, positions=14) == range(12, 14)
    for arguments in ({"step": -1}, {"group": 2, "groups": 2}, {"samples_per_step": 0}):
        with pytest.raises(ValueError, match="no window"):
            window_positions(**{"step": 0, "samples_per_step": 4, "positions": 8, **arguments})
