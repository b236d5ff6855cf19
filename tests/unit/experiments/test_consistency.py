"""The consistency experiment: its distributions are exact, its events are the source's, its table can be made."""

import numpy as np
import pytest
import torch

from experiments.consistency import expected, page
from experiments.consistency.__main__ import VARIANTS, losses_of
from experiments.consistency.by_class import CLASSES, ByClass
from experiments.consistency.chain_terms import chain_terms
from experiments.consistency.exact import make_world
from experiments.consistency.expected import kl_per_token, logits_of
from experiments.consistency.measure import at_the_truth, descend, rate_of
from experiments.consistency.source import SPLIT_NUMERALS, WHOLE_NUMERALS, make_source, sample_texts, train_tokenizer
from xtoken_core.chain import ChainTables, build_tables
from xtoken_core.losses.alm import ALMLoss
from xtoken_core.ops.chain.events import Starts
from xtoken_core.ops.chain.reference import ChainOptions, start_values


@pytest.fixture(scope="module")
def case():
    source = make_source(12, 30, seed=0)
    student = train_tokenizer(source, 90, WHOLE_NUMERALS, seed=1)
    teacher = train_tokenizer(source, 80, SPLIT_NUMERALS, seed=2)
    world = make_world(source, student, teacher)
    return source, student, teacher, world, ChainTables.of(build_tables(student, teacher))


def test_distributions_sum_to_one(case):
    world = case[3]
    for side in world.sides:
        torch.testing.assert_close(side.truth.sum(1), torch.ones(len(side.truth), dtype=torch.float64))


def test_rates_equal_those_of_sampled_text(case):
    source, student, _, world, _ = case
    texts = sample_texts(source, 60, 300, seed=7)
    tokens = np.concatenate([student.encode("".join(source.units[u] for u in units)) for units in texts])
    side = world.sides[0]
    exact = (side.rate.unsqueeze(1) * side.truth).sum(0).numpy()
    counted = np.bincount(tokens, minlength=len(exact)) / len(tokens)
    assert np.abs(counted - exact / exact.sum()).max() < 0.02


def test_every_chunk_is_met_once_per_unit(case):
    source, student, _, world, _ = case
    pieces = [len(student.encode(unit)) for unit in source.units]
    weight = source.stationary @ source.weight
    tokens = sum(rate * len(tokens[0]) for (_, _, tokens), rate in world.chunks.items())
    assert tokens == pytest.approx(float(weight @ np.array(pieces)))
    assert sum(world.starts.values()) == pytest.approx(sum(world.chunks.values()))


def test_cross_entropy_is_consistent(case):
    world = case[3]
    noise = 0.5 * torch.randn(world.sides[0].truth.shape, dtype=torch.float64)
    assert at_the_truth(world, expected.cross_entropy(world), noise)["all"]["relative_gradient"] < 1e-9
    assert kl_per_token(world, logits_of(world.sides[0].truth)) < 1e-9


def test_conditioning_lowers_the_value_at_the_truth(case):
    _, _, _, world, tables = case
    truth = logits_of(world.sides[0].truth)
    values = {
        name: sum(map(float, expected.chain(world, tables, options)(truth).values()))
        for name, options in VARIANTS.items()
    }
    assert values["chain, all corrections"] < 0.25 * values["chain"]


def test_descent_improves_for_every_loss(case):
    _, student, teacher, world, tables = case
    truth = world.sides[0].truth
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(truth.shape, dtype=torch.float64, generator=generator)
    near = logits_of(0.9 * truth + 0.1 / truth.shape[1]) + noise
    for name, prepare in losses_of(world, tables, (student, teacher)).items():
        if name not in CLASSES:
            found = descend(world, [(1.0, prepare())], near, 12)
            assert found["best"] < 0.7 * found["start"], name


def test_chain_terms_are_those_of_single_events(case):
    """The sum over comparisons equals the sum over all starts and nodes, each computed by the library."""
    *_, world, tables = case
    logits = logits_of(world.sides[0].truth).flip(0)
    teacher = logits_of(world.sides[1].truth)
    starts = [(rows, first, before, rate) for (_, rows, first, before), rate in world.starts.items()]
    columns = [torch.tensor([entry[i][k] for entry in starts]) for i in (0, 1, 2) for k in (0, 1)]
    events = Starts(torch.arange(len(starts)), *columns, torch.ones(len(starts), dtype=torch.bool))
    rates = torch.tensor([entry[3] for entry in starts], dtype=torch.float64)
    values = start_values(logits[events.student_row], teacher[events.teacher_row], events, tables, conditioning=True)
    no_inner = {key: terms[:1] for key, terms in chain_terms(world, teacher, tables, ChainOptions()).items()}
    found = sum(float(term(logits)) for terms in no_inner.values() for term in terms)
    assert found == pytest.approx(float((rates * values).sum()), rel=1e-6)


def test_loss_classes_are_expected_over_chunks(case):
    """ALM through `evaluate` equals the exact formula; a sampled value is near it."""
    _, student, teacher, world, _ = case
    CLASSES["ALM"] = ALMLoss, {"mode": "alm", "alm_temperature": 1.0}
    try:
        loss = ByClass(world, (student, teacher), "ALM", heaviest=10**6)
    finally:
        del CLASSES["ALM"]
    logits = logits_of(world.sides[0].truth).flip(0)
    exact = sum(map(float, expected.likelihood_matching(world, 1.0)(logits).values()))
    assert loss.covered == pytest.approx(1.0)
    assert sum(map(float, loss(logits).values())) == pytest.approx(exact, rel=1e-6)
    assert sum(map(float, loss.sampled(0, 4000)(logits).values())) == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_a_value_at_the_truth(case, name):
    _, student, teacher, world, _ = case
    noise = 0.5 * torch.randn(world.sides[0].truth.shape, dtype=torch.float64)
    found = at_the_truth(world, ByClass(world, (student, teacher), name, heaviest=60), noise)
    assert set(found) >= {"all", "1:1"} and rate_of(world, "all") > 0
    assert all(np.isfinite([entry["value"], entry["relative_gradient"]]).all() for entry in found.values())


def test_the_page_is_in_step_with_the_results():
    assert page.render() == page.PAGE.read_text(encoding="utf-8"), "run: python -m experiments.consistency.page"
