"""Losses by mode, and teachers from projection files."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from tests.unit.losses.loss_cases import V_S, make_case
from xtoken_core.config import LossConfig
from xtoken_core.config.loss import COLUMN_SELECTING_MODES, DENSE_ONLY, LossMode
from xtoken_core.errors import ConfigError
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence
from xtoken_core.losses.gold import GoldLoss
from xtoken_core.losses.p_kl import PKLLoss
from xtoken_core.losses.registry import LOSSES, load_teacher

CPU = torch.device("cpu")


def loss_of(case, config, teacher):
    loss_fn = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=[teacher])
    return loss_fn(case.batch, case.student_logits, case.teacher_logits)[0]


def load(path):
    return load_teacher(path, vocab_size=31, student_vocab_size=V_S, device=CPU, weight=2.0)


@pytest.fixture
def sparse(tmp_path):
    """The random case's projection in the public sparse form."""
    teacher = make_case().teachers[0]
    pairs = zip(teacher.indices.tolist(), teacher.likelihoods.tolist(), strict=True)
    rows = enumerate(zip(ids, weights, strict=True) for ids, weights in pairs)
    torch.save({(s, t): w for s, row in rows for t, w in row if t >= 0}, tmp_path / "sparse.pt")
    return tmp_path / "sparse.pt"


def test_every_mode_has_a_loss():
    assert {*LOSSES, "custom"} == set(get_args(LossMode))


def test_modes_that_select_columns_are_those_whose_classes_do():
    assert {mode for mode, loss in LOSSES.items() if loss.columns is not ChunkLoss.columns} == COLUMN_SELECTING_MODES


@pytest.mark.parametrize("mode", sorted(set(LOSSES) - DENSE_ONLY - {"chain"}))
def test_a_sparse_projection_trains_like_the_dense_one(mode, sparse, tmp_path):
    case, config = make_case(), LossConfig(mode=mode)
    teacher = case.teachers[0]
    torch.save({"indices": teacher.indices, "likelihoods": teacher.likelihoods}, tmp_path / "dense.pt")
    expected = loss_of(case, config, load(tmp_path / "dense.pt"))
    torch.testing.assert_close(loss_of(case, config, load(sparse)), expected, rtol=1e-6, atol=0)
    assert load(sparse).weight == 2.0 and not load(sparse).same_tokenizer


@pytest.mark.parametrize("mode", sorted(DENSE_ONLY))
def test_a_sparse_projection_is_refused_where_rows_are_read(mode, sparse):
    with pytest.raises(ConfigError, match="dense top-k projection"):
        loss_of(make_case(), LossConfig(mode=mode), load(sparse))


def test_a_teacher_without_projection_has_the_students_tokenizer_unless_its_own():
    assert load(None).same_tokenizer
    assert not load_teacher(None, vocab_size=31, student_vocab_size=V_S, device=CPU, own_tokenizer=True).same_tokenizer


class HalfOfEveryChunk(GoldLoss):
    """A loss of a user's own: half of gold's."""

    def evaluate(self, inputs):
        divergence = super().evaluate(inputs)
        return Divergence(tuple(part / 2 for part in divergence.parts))


def test_other_classes_may_be_given():
    case = make_case()
    sizes = {"student_vocab_size": V_S, "teachers": case.teachers}
    arguments = case.batch, case.student_logits, case.teacher_logits
    config = LossConfig(mode="gold", ce_loss_scale=0.0)
    expected, _ = CrossTokenizerDistillationLoss(config, **sizes)(*arguments)
    classes = {"p_kl": PKLLoss, "gold": HalfOfEveryChunk}
    loss, metrics = CrossTokenizerDistillationLoss(config, **sizes, loss_classes=classes)(*arguments)
    torch.testing.assert_close(loss, expected / 2)
    assert "proj_accuracy_t0" not in metrics
