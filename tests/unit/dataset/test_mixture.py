"""The order of records, and texts with weights."""

import json
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.cases import cases
from tests.support.examples import examples
from tests.support.runs import resolved_run
from xtoken_core.config import DataSpec
from xtoken_core.dataset import BadRecord, DataIndex, JoinedIndex, Record, mixed_record_at, record_at
from xtoken_services.common.text.run_order import rotated

SIZES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 20)), min_size=1, max_size=4)


def spec_of(weights: list[float | None]) -> DataSpec:
    sources = [{"path": f"{n}.txt"} | ({} if w is None else {"weight": w}) for n, w in enumerate(weights)]
    return DataSpec.model_validate({"sources": sources})


@examples(20, 50)
@given(sizes=SIZES, seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_an_epoch_holds_every_record_and_the_weights(sizes: list[tuple[int, float]], seed: int, shuffle: bool) -> None:
    records, weights = tuple(n for n, _ in sizes), [w for _, w in sizes]
    samples = spec_of(weights).samples_per_epoch(records)  # type: ignore[arg-type]
    sources = list(zip(records, samples, strict=True))
    epoch = sum(samples)
    read = Counter(mixed_record_at(p, sources=sources, seed=seed, shuffle=shuffle) for p in range(epoch))
    start = 0
    for (count, of_epoch), weight in zip(sources, weights, strict=True):
        times = [read[number] for number in range(start, start + count)]
        assert sum(times) == of_epoch and max(times) - min(times) <= 1 and min(times) >= 1
        assert abs(of_epoch - epoch * weight / sum(weights)) <= len(sizes)
        start += count
    assert any(count == of_epoch for count, of_epoch in sources)  # no shorter epoch holds every record


@examples(20, 50)
@given(sizes=SIZES, seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_no_record_is_read_twice_on_the_first_pass(
    sizes: list[tuple[int, float]], seed: int, shuffle: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    records = tuple(n for n, _ in sizes)
    samples = spec_of([w for _, w in sizes]).samples_per_epoch(records)  # type: ignore[arg-type]
    mixture = tuple(zip(records, samples, strict=True))
    run = resolved_run(tmp_path_factory.getbasetemp()).model_copy(update={"records": sum(records), "mixture": mixture})
    read = Counter(mixed_record_at(p, sources=mixture, seed=seed, shuffle=shuffle) for p in range(run.first_pass))
    assert max(read.values(), default=1) == 1
    shortest = min(count * sum(samples) / of_epoch for count, of_epoch in mixture)
    assert shortest - run.first_pass <= len(sizes) * sum(samples) / min(samples), "and little of it is left out"
    assert run.model_copy(update={"mixture": ()}).first_pass == sum(records)


def test_every_window_has_the_weights_and_epochs_continue() -> None:
    sources = [(10, 30), (60, 60), (4, 10)]
    order = [mixed_record_at(p, sources=sources, seed=5, shuffle=True) for p in range(300)]
    for first in range(0, 300, 10):
        window = order[first : first + 10]
        assert abs(sum(n < 10 for n in window) - 3) <= 1 and abs(sum(n >= 70 for n in window) - 1) <= 1
    last = [number for number in order if number >= 70]
    assert all(set(last[i : i + 4]) == {70, 71, 72, 73} for i in range(0, 28, 4))
    assert order[:100] != order[100:200]


@cases(
    "weights, per_step, prompts",
    ((1, 1), 4, 1),
    ((1, 1), 2, 1),
    ((3, 1), 8, 2),
    ((9, 1), 20, 2),
    ((2, 1, 1), 8, 2),
    ((1, 3), 8, 2),
    ((1, 1), 6, 6),
)
def test_prompts_and_text_come_from_all_sources_by_weight(
    weights: tuple[int, ...], per_step: int, prompts: int
) -> None:
    """Prompts are the last positions of every step, sources recur in every step: the two must not fall together."""
    sources = [(3000, 1000 * weight) for weight in weights]
    counts: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for position in range(400 * per_step):
        step, index = divmod(position, per_step)
        read = mixed_record_at(step * per_step + rotated(index, per_step, step), sources=sources, seed=0, shuffle=True)
        counts[position % per_step >= per_step - prompts][read // 3000] += 1
    for found in counts.values():
        for source, weight in enumerate(weights):
            assert found[source] == pytest.approx(found.total() * weight / sum(weights), rel=0.05)


@given(step=st.integers(0, 10**9), per_step=st.integers(1, 64))
def test_a_step_keeps_its_records(step: int, per_step: int) -> None:
    assert sorted(rotated(index, per_step, step) for index in range(per_step)) == list(range(per_step))


def test_texts_of_one_length_are_ordered_apart() -> None:
    order = [mixed_record_at(p, sources=[(50, 50), (50, 50)], seed=1, shuffle=True) for p in range(100)]
    assert [n for n in order if n < 50] != [n - 50 for n in order if n >= 50]


GOLDEN = [4, 2, 3, 1, 0, 5, 1, 6, 2, 0]


def test_the_order_of_a_mixture_must_never_change() -> None:
    order = [mixed_record_at(p, sources=[(3, 6), (4, 4)], seed=7, shuffle=True) for p in range(10)]
    assert order == GOLDEN


def test_joined_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in ("three", "", "five")))
    parts = [
        DataIndex.build([tmp_path / name], field=field, cache_dir=tmp_path / "cache")
        for name, field in (("a.txt", "text"), ("b.jsonl", "body"))
    ]
    joined = JoinedIndex(parts)
    assert len(joined) == 5 and list(joined.documents()) == ["one", "two", "three", "five"]
    last, bad, first = joined.read([4, 3, 0])
    assert isinstance(last, Record) and (last.number, last.document) == (4, "five")
    assert isinstance(bad, BadRecord) and bad.number == 3
    assert isinstance(first, Record) and first.document == "one"
    assert joined.location(4) == f"{tmp_path}/b.jsonl:3"
    assert joined.fingerprint != JoinedIndex(parts[::-1]).fingerprint
    with pytest.raises(IndexError):
        joined.read([5])


@cases(
    "document, message",
    ({}, "name the text by path"),
    ({"path": "a.txt", "sources": [{"path": "b.txt"}]}, "one of the two"),
    ({"sources": [{"path": "a.txt", "weight": 1}, {"path": "b.txt"}]}, "give one to all or to none"),
    ({"sources": [{"path": "a.txt", "weight": 0}]}, "greater than or equal"),
)
def test_impossible_texts(document: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSpec.model_validate(document)


def test_texts_without_weights_are_one() -> None:
    data = spec_of([None, None])
    assert data.samples_per_epoch((3, 4)) == ()
    assert data.paths == (Path("0.txt"), Path("1.txt"))
    assert data.texts[0].field == "text"


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


GOLDEN_ORDER = [8, 3, 4, 6, 1, 2, 7, 9, 0, 5, 0, 5, 8, 9, 6, 2, 1, 3, 7, 4]


def test_the_order_is_part_of_a_checkpoint_and_must_never_change() -> None:
    assert [record_at(p, records=10, seed=7, shuffle=True) for p in range(20)] == GOLDEN_ORDER


def test_unshuffled_epochs_keep_the_order_of_the_data() -> None:
    assert [record_at(p, records=3, seed=9, shuffle=False) for p in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("position", "records"), [(-1, 5), (0, 0)])
def test_impossible_positions_are_refused(position: int, records: int) -> None:
    with pytest.raises(ValueError, match="no record stands at position"):
        record_at(position, records=records, seed=0, shuffle=True)
