"""The teacher's mass on tokens that no row of a projection names."""

import pytest
import torch

from tests.unit.losses.loss_cases import V_S, make_case
from tests.unit.losses.test_topk import filled, largest
from xtoken_core import schema
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.common import ChunkView
from xtoken_core.losses.lazy_logits import HeadProjection

CONFIG = LossConfig(vocab_topk=12, temperature=2.0)


def named_tokens(case):
    indices, likelihoods = case.teachers[0].rows()
    return set(indices[(indices >= 0) & (likelihoods > 0)].tolist())


def expected(case):
    """Mean over valid chunks of the mean over their predicting positions, by the definition."""
    named = named_tokens(case)
    logits = case.teacher_logits[0][..., :31]
    columns = logits.flatten(0, 1).amax(0).topk(12).indices
    missing = torch.tensor([c not in named for c in columns.tolist()])
    return mean_over_chunks(case, (logits[..., columns] / 2.0).softmax(-1)[..., missing].sum(-1))


def mean_over_chunks(case, mass):
    view = ChunkView.of(schema.with_numbers(case.batch), 0, CONFIG, "p_kl")
    rows, chunks = view.valid.nonzero(as_tuple=True)
    means = [mass[row][view.teacher_chunk_id[row] == chunk].mean() for row, chunk in zip(rows, chunks, strict=True)]
    return torch.stack(means).mean()


@pytest.mark.parametrize("blockwise", [False, True])
def test_it_is_the_mean_over_valid_chunks(blockwise):
    case = make_case(seed=3)
    loss = CrossTokenizerDistillationLoss(CONFIG, student_vocab_size=V_S, teachers=case.teachers)
    head = case.student_logits.requires_grad_()
    if blockwise:
        head = HeadProjection(head, torch.eye(head.shape[-1], dtype=head.dtype))
    metrics = loss(case.batch, head, case.teacher_logits)[1]
    assert 0 < metrics["unreachable_mass_t0"] < 1
    torch.testing.assert_close(metrics["unreachable_mass_t0"], expected(case).float())


@pytest.mark.parametrize("compared", [None, 12, 30])
@pytest.mark.parametrize("k", [6, 31])
def test_of_the_largest_logits_the_rest_counts_by_its_tokens(k, compared):
    """All tokens that are not compared are one class, which counts by how many of its tokens no row names."""
    case, named = make_case(seed=3), named_tokens(make_case(seed=3))
    config = CONFIG.model_copy(update={"vocab_topk": compared})
    topk = largest(case, config, k)
    columns = topk.column_maximum().sort(descending=True, stable=True).indices[: compared or 31].tolist()
    p = filled(topk).div(config.temperature).softmax(-1)
    mass = p[..., [c for c in columns if c not in named]].sum(-1)
    if others := set(range(31)) - set(columns):
        mass += p[..., list(others)].sum(-1) * len(others - named) / len(others)
    loss = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=case.teachers)
    metrics = loss(case.batch, case.student_logits, [topk])[1]
    assert 0 < metrics["unreachable_mass_t0"] < 1
    torch.testing.assert_close(metrics["unreachable_mass_t0"], mean_over_chunks(case, mass).float())


def test_a_token_of_every_row_leaves_none_unreachable():
    case = make_case()
    indices = case.teachers[0].indices
    indices[:, 0] = torch.arange(V_S)
    indices[:8, 1], case.teachers[0].likelihoods[:8] = torch.arange(V_S, 31), torch.tensor([0.5, 0.5, 0.0])
    case.teachers[0].likelihoods[8:] = torch.tensor([1.0, 0.0, 0.0])
    loss = CrossTokenizerDistillationLoss(CONFIG, student_vocab_size=V_S, teachers=case.teachers)
    assert loss(case.batch, case.student_logits, case.teacher_logits)[1]["unreachable_mass_t0"] == 0
