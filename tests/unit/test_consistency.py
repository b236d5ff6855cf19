"""The consistency experiment: its distributions are exact, its events are the source's, its table can be made."""

import numpy as np
import pytest
import torch

from experiments.consistency import expected
from experiments.consistency.__main__ import VARIANTS, at_the_truth, descend, losses_of
from experiments.consistency.exact import make_world
from experiments.consistency.expected import kl_per_token, logits_of
from experiments.consistency.source import SPLIT_NUMERALS, WHOLE_NUMERALS, make_source, sample_texts, train_tokenizer
from xtoken_core.chain import ChainTables, build_tables


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
    _, _, _, world, tables = case
    truth = world.sides[0].truth
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(truth.shape, dtype=torch.float64, generator=generator)
    near = logits_of(0.9 * truth + 0.1 / truth.shape[1]) + noise
    for name, loss in losses_of(world, tables).items():
        found = descend(world, [(1.0, loss)], near, 12, sum(world.chunks.values()))
        assert found["best"] < 0.7 * found["start"], name
