"""Borders of blocks, of denominators and of what a teacher's loss reads."""

import warnings

import pytest
import torch

from tests.support import vocabularies
from tests.unit.losses.loss_cases import V_S, loss_of, make_case
from xtoken_core import schema
from xtoken_core.chain.build import cached_tables
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection
from xtoken_core.losses.chunk_classes import class_means
from xtoken_core.losses.common import ChunkView, partial_mean
from xtoken_core.losses.gold import first_rows
from xtoken_core.losses.known_gradients import _scaled
from xtoken_core.losses.lazy_logits import HeadRows, row_logits
from xtoken_core.losses.masks import kept_chunk_ids
from xtoken_core.losses.objective import ComparedTeacher
from xtoken_core.losses.p_kl import column_log_probs
from xtoken_core.losses.registry import load_teacher
from xtoken_core.losses.token_blocks import (
    Extent,
    PackedExtent,
    _block_of_runs,
    _largest_group,
    blocks_of_packed_samples,
    blocks_of_samples,
    packed_blocks,
)
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings

CPU = torch.device("cpu")


@pytest.mark.parametrize(("denominator", "mean"), [(0.0, 6.0), (1.0, 6.0), (2.0, 3.0), (4.0, 1.5)])
def test_mean_over_a_step(denominator, mean):
    total = torch.tensor(6.0)
    assert partial_mean(total, torch.tensor(denominator)).item() == mean
    assert partial_mean(total, denominator).item() == mean


def test_cross_entropy_without_teachers():
    case = make_case()
    config = LossConfig(mode="p_kl", kl_loss_weight=0.0, ce_loss_scale=0.5)
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


def test_padding_of_the_last_block_is_in_no_chunk():
    ids = torch.tensor([[0, 1]] * 3)
    valid = torch.ones(3, 2, dtype=torch.bool)
    sides = blocks_of_samples((3, 2), [Extent(ChunkView(ids, ids, valid, valid), 2), Extent(None, 2)], 4, CPU).teachers
    assert sides[0].student_chunk_id.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]
    assert sides[1].rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_blocks_of_packed_samples():
    sample = torch.tensor([[0, 0, 1, 1]])
    blocks = blocks_of_packed_samples(sample, [PackedExtent(None, sample, None)], 2)
    assert blocks.rows.shape[0] == 2
    assert blocks.rows[:, :3].tolist() == [[0, 1, 4], [2, 3, 4]]
    assert torch.equal(blocks.teachers[0].rows, blocks.rows)


def test_a_position_of_no_chunk_has_the_number_of_none():
    ids, valid = torch.tensor([[0, 0, -1, 1]]), torch.tensor([[True, False]])
    needed = torch.ones(1, 4, dtype=torch.bool)
    (side,) = packed_blocks(needed, [Extent(ChunkView(ids, ids, valid, valid), 4)], 4).teachers
    assert sorted(side.student_chunk_id[0].tolist()) == [-1, -1, 0, 0]
    assert packed_blocks(needed[:, :1], [], 1).rows.tolist() == [[0]]


@pytest.mark.parametrize(("size", "rounded"), [(1, 128), (128, 128), (129, 256)])
def test_widths_are_whole_tiles(size, rounded):
    assert _largest_group(torch.zeros(size, dtype=torch.int64)) == rounded


def test_chunks_that_are_not_kept():
    ids = torch.tensor([[-1, 0, 1, 2, 3]])
    assert kept_chunk_ids(ids, torch.tensor([[True, False]])).tolist() == [[-1, 0, -1, -1, -1]]
    assert kept_chunk_ids(ids, torch.tensor([[True, True]])).tolist() == [[-1, 0, 1, -1, -1]]


def test_a_sum_without_its_count_has_no_mean():
    assert class_means({"chunk_kl_sum_1to1_t0": 3.0}) == {}


def test_columns_of_a_head_with_a_bias():
    torch.manual_seed(0)
    head = HeadProjection(torch.randn(2, 3, 4), torch.randn(7, 4), torch.randn(7))
    columns = torch.tensor([5, 0, 3])
    torch.testing.assert_close(head.logits(columns), head.logits()[..., columns])
    rows = HeadRows(head, columns=columns)(torch.tensor([4, 1]))
    torch.testing.assert_close(rows[0], head.logits().flatten(0, 1)[[4, 1]][:, columns])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = HeadRows(head)(torch.tensor([2]))
    torch.testing.assert_close(one[0, 0], head.logits()[0, 2])


@pytest.mark.parametrize(("k", "width"), [(4, 4), (31, 31), (None, 31)])
def test_only_the_compared_columns_are_multiplied(k, width):
    case = make_case()
    loss_fn = loss_of(case, LossConfig(vocab_topk=k))
    (loss,) = loss_fn.losses
    assert loss.compares_subset == (width < 31)
    head = HeadProjection(torch.randn(4, 10, 5), torch.randn(31, 5))
    teacher = ComparedTeacher(loss, head, loss.columns(head), loss.pairing(schema.with_numbers(case.batch)))
    logits, gathered = teacher.whole()
    assert (logits.shape[-1], gathered) == (width, width < 31)
    rows, gathered = teacher.rows()
    assert (rows(torch.tensor([0, 1])).shape[-1], gathered) == (width, width < 31)
    assert teacher.pairing.teacher_targets is None, "no loss but ALM reads them"


@pytest.mark.parametrize("k", [4, V_S, None])
def test_columns_of_a_teacher_with_the_students_tokenizer(k):
    case = make_case(same_tokenizer=(True,))
    loss_fn = loss_of(case, LossConfig(vocab_topk=k))
    (loss,) = loss_fn.losses
    assert loss.compares_subset == (k == 4)
    expected = (case.batch["token_mask"][:, 1:] * case.batch["sample_mask"][:, None]).sum().item()
    assert loss.count(case.batch).item() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_is_scaled_in_the_dtype_of_its_operand(dtype):
    x = torch.ones(3)
    scaled = _scaled(x, torch.tensor(2.0), dtype)
    assert scaled.dtype == dtype and scaled.tolist() == [2.0] * 3
    assert (scaled.data_ptr() == x.data_ptr()) == (dtype == torch.float32), "in place where it can be"


def test_rows_that_a_projection_lacks():
    x = torch.tensor([[1], [2], [3]])
    assert first_rows(x, 2, fill=-1).tolist() == [[1], [2]]
    assert first_rows(x, 5, fill=-1).tolist() == [[1], [2], [3], [-1], [-1]]


def test_rows_of_leading_columns():
    logits = torch.arange(24.0).view(2, 3, 4)
    assert row_logits(logits, width=2)(torch.tensor([4, 9])).tolist() == [[[16.0, 17.0], [20.0, 21.0]]]
    assert torch.equal(row_logits(logits)(torch.arange(6))[0], logits.view(6, 4))


def test_blocks_of_a_batch_on_a_device_have_every_position():
    case = make_case(lengths=(9, 7), teacher_vocab=(5,))
    loss_fn = loss_of(case, LossConfig(mode="p_kl"))
    (teacher,) = case.teacher_logits
    batch = {name: x.to("meta") for name, x in schema.with_numbers(case.batch).items()}
    blocks = loss_fn._blocks(batch, [teacher.to("meta")])
    assert blocks.rows.shape == (1, 2 * case.batch["input_ids"].shape[1])
    assert blocks.teachers[0].rows.shape == (1, 2 * teacher.shape[1])


def test_probabilities_of_compared_columns_of_the_largest_logits():
    torch.manual_seed(0)
    whole = torch.randn(1, 4, 9, dtype=torch.float64)
    topk = largest_logits(whole, torch.zeros(1, 4, dtype=torch.int64), TopKSettings(3, 9, 1.0))
    columns = torch.tensor([7, 0, 4])
    filled = topk.log_equal_part().unsqueeze(-1).repeat(1, 1, 10).scatter(-1, topk.columns, topk.log_probs())[..., :9]
    found = column_log_probs(topk, columns).exp()
    torch.testing.assert_close(found[..., :3], filled[..., columns].exp())
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 4, dtype=torch.float64), rtol=1e-6, atol=0)
