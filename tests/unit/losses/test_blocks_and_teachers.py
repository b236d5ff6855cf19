"""Borders of blocks, of denominators and of what a teacher's loss reads."""

from __future__ import annotations

import pytest
import torch

from tests.support import vocabularies
from tests.unit.losses.loss_cases import V_S, make_case
from xtoken_core.chain.files import cached_tables
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.common import ChunkView, partial_mean
from xtoken_core.losses.registry import load_teacher
from xtoken_core.losses.token_blocks import Extent, _block_of_runs, blocks_of_samples, packed_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("denominator", "mean"), [(0.0, 6.0), (1.0, 6.0), (2.0, 3.0), (4.0, 1.5)])
def test_mean_over_a_step(denominator, mean):
    total = torch.tensor(6.0)
    assert partial_mean(total, torch.tensor(denominator)).item() == mean
    assert partial_mean(total, denominator).item() == mean


def test_cross_entropy_without_teachers():
    case = make_case()
    config = LossConfig(kl_loss_weight=0.0, ce_loss_scale=0.5)
    loss_fn = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=[])
    loss, metrics = loss_fn(case.batch, case.student_logits, [])
    assert loss.item() == pytest.approx(0.5 * metrics["ce_loss"].item()) and "kl_loss" not in metrics


def test_samples_of_one_position_fill_a_block():
    assert blocks_of_samples((4, 1), [], 4, CPU).rows.shape == (1, 4)


def test_a_chunk_beyond_the_last_is_in_no_block():
    ids = torch.tensor([[0, 1], [0, 2]])  # 2 chunks per sample: the last id is out of range
    valid = torch.ones(2, 2, dtype=torch.bool)
    (side,) = blocks_of_samples((2, 2), [Extent(ChunkView(ids, ids, valid, valid), 2)], 4, CPU).teachers
    assert side.student_chunk_id.tolist() == [[0, 1, 2, -1]]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_a_batch_without_positions_is_one_empty_block(shape):
    assert packed_blocks(torch.zeros(shape, dtype=torch.bool), [], 8).rows.shape[0] == 1


def test_runs_fill_as_few_blocks_as_they_need():
    assert _block_of_runs(torch.full((8,), 2), 8).tolist() == [0] * 4 + [1] * 4


def test_chain_tables_are_read_for_their_teacher(tmp_path):
    built = cached_tables(vocabularies.byte_level(300), vocabularies.byte_level(280), tmp_path)
    (path,) = (tmp_path / "chain").iterdir()
    size = len(built.teacher.root)
    teacher = load_teacher(None, vocab_size=size, student_vocab_size=300, device=CPU, weight=2.0, tables=path)
    assert (teacher.vocab_size, teacher.weight) == (size, 2.0)
    assert torch.equal(teacher.tables.student.root, built.student.root)
