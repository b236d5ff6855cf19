"""The chain loss of what the collator makes of records, and importance weights of generated text."""

import math

import pytest
import torch

from tests.support import vocabularies
from tests.support.alignments import collator_of
from tests.support.packed import packed_whole
from tests.unit.chain.test_chain_loss import V_S, VERSIONS, evaluate
from tests.unit.chain.test_chain_loss import case as case
from tests.unit.chain.test_chain_loss import tables as tables
from tests.unit.chain.test_chain_loss import teacher as teacher
from xtoken_core import schema
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.config import LossConfig
from xtoken_core.errors import InputError
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection, LossTeacher, combine_metrics
from xtoken_core.losses.common import ChunkView
from xtoken_core.losses.importance import chunk_weights
from xtoken_core.losses.masks import loss_counts
from xtoken_core.schema import with_numbers

CONFIG = LossConfig(mode="chain")
PAIRS = {
    "unigram": (vocabularies.unigram, vocabularies.byte_level),
    "nfkc": (lambda: vocabularies.unigram(nfkc=True), vocabularies.byte_level),
    "lower case": (vocabularies.byte_level, lambda: vocabularies.wordpiece(lowercase=True)),
}
RECORDS = [
    {"text": "The quick brown fox: 1,234.56 metres ﬁ ½"},
    {"prompt": "two  spaces\n", "completion": "日本語の文章 👍🏿 number 4567"},
    {"text": ""},
    {"text": "a"},
    {"text": "e\u0301 A\u0308 lowest 2024", "loss_multiplier": 0.0},
]


@pytest.mark.parametrize("name", PAIRS)
def test_records_of_every_kind(name):
    student, teacher = (make() for make in PAIRS[name])
    tables = as_tensors(build_tables(student, teacher))
    sizes = len(tables.student.root), len(tables.teacher.root)
    collator = collator_of(student, teacher, 48, 64, aligner=None)
    loss_fn = CrossTokenizerDistillationLoss(
        CONFIG, student_vocab_size=sizes[0], teachers=[LossTeacher(sizes[1], tables=tables)]
    )
    batch = dict(collator.padded(RECORDS))
    counts = loss_counts(CONFIG, [False])(batch)
    chunks = counts[schema.field_name(schema.KD_CHUNKS, 0)]
    generator = torch.Generator().manual_seed(3)
    logits = [
        3 * torch.randn(*batch[field].shape, width + 1, generator=generator, dtype=torch.float64)
        for field, width in (("input_ids", sizes[0]), ("teacher_0_input_ids", sizes[1]))
    ]

    def evaluate(rows, **step):
        z = logits[0][rows].clone().requires_grad_()
        loss, metrics = loss_fn({k: v[rows] for k, v in batch.items()}, z, [logits[1][rows]], **step)
        loss.backward()
        return loss.detach(), z.grad, {k: v.item() for k, v in metrics.items()}

    loss, gradient, metrics = evaluate(slice(None))
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert metrics["num_valid_chunks_t0"] == chunks[[0, 1, 3]].sum() > 0
    assert metrics["kl_loss"] > 0
    assert not gradient[[2, 4]].any()
    step = {
        "global_valid_toks": counts[schema.CE_TOKENS.name][[0, 1, 3]].sum(),
        "global_valid_chunks": [chunks[[0, 1, 3]].sum()],
    }
    alone = [evaluate([row], **step) for row in range(len(RECORDS))]
    torch.testing.assert_close(sum(each[0] for each in alone), loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.cat([each[1] for each in alone]), gradient, rtol=1e-7, atol=1e-12)
    assert combine_metrics(each[2] for each in alone) == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_a_truncated_document_has_no_end_of_text():
    student, teacher = vocabularies.byte_level(300), vocabularies.byte_level(400)
    tables = as_tensors(build_tables(student, teacher))
    collator = collator_of(student, teacher, 24, 24, aligner=None)
    texts = ["ab\n", "lowest " * 30, "one 12\n    if x:\n" * 9]
    batch = schema.with_numbers(dict(collator.padded([{"text": text} for text in texts])))
    (loss,) = CrossTokenizerDistillationLoss(
        CONFIG,
        student_vocab_size=len(tables.student.root),
        teachers=[LossTeacher(len(tables.teacher.root), tables=tables)],
    ).losses
    pairing = loss.pairing(batch)
    for ids, chunk_id, tokenizer in zip(
        (pairing.student_targets, pairing.teacher_targets), pairing.chunk_ids, (student, teacher), strict=True
    ):
        compared = (ids == tokenizer.eos_token_id) & (chunk_id >= 0)
        assert compared.any(1).tolist() == [True, False, False]


CAP = 1.5
CAPPED = LossConfig(mode="chain", ce_loss_scale=0.0, importance_cap=CAP)


def losses_of(student, ids):
    """`[B, T]` nats of the token that each position predicts."""
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    return -student.log_softmax(-1).gather(-1, following.unsqueeze(-1)).squeeze(-1).detach()


@pytest.fixture
def stale(case):
    """The batch with log-probabilities of other weights, and the weight of each chunk by loops."""
    _, columns, student, z_t = case
    losses, ids = losses_of(student, columns["input_ids"]), columns["input_ids"]
    noise = torch.randn(ids.shape, generator=torch.Generator().manual_seed(4), dtype=losses.dtype)
    sampled = torch.cat([torch.zeros_like(losses[:, :1]), -losses[:, :-1]], 1) + 0.3 * noise
    columns = with_numbers({**columns, "weights_version": VERSIONS, "sampled_log_probs": sampled})
    chunks, mask = columns["alignment_0_student_chunk_id"], columns["token_mask"]
    expected = torch.ones(columns["alignment_0_pair_valid"].shape, dtype=losses.dtype)
    for row in range(len(ids)):
        total = 0.0
        for at in range(1, ids.shape[1]):
            chunk = int(chunks[row, at])
            if chunk >= 0 and chunk != chunks[row, at - 1]:
                expected[row, chunk] = math.exp(min(total, math.log(CAP))) if VERSIONS[row] >= 0 else 1.0
            if mask[row, at]:
                total += float(-losses[row, at - 1] - sampled[row, at])
    return columns, student, z_t, losses, expected


def test_a_chunk_weighs_the_ratio_of_what_precedes_it(stale):
    columns, _, _, losses, expected = stale
    view = ChunkView.of(columns, 0, CAPPED, "chain")
    found = chunk_weights(columns, losses, view, CAP)
    used = view.valid & (columns["alignment_0_student_chunk_id"][:, :1] != torch.arange(expected.shape[1]))
    torch.testing.assert_close(found[used], expected[used])
    assert found.max() == pytest.approx(CAP)
    assert found[used].unique().numel() >= 3


def test_packed_rows_and_heads_in_blocks_have_the_same_loss(stale, teacher):
    columns, student, z_t, *_ = stale
    loss, grad, metrics = evaluate(CAPPED, columns, student, [teacher], [z_t])
    plain, *_ = evaluate(CAPPED.model_copy(update={"importance_cap": None}), columns, student, [teacher], [z_t])
    assert abs(loss - plain) > 1e-3
    assert 0 < metrics["importance_weight_t0"] < CAP
    packed, (z_s, other) = packed_whole(columns, [student, z_t])
    again, gradient, _ = evaluate(CAPPED, packed, z_s, [teacher], [other])
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient.view_as(grad), grad, rtol=1e-4, atol=1e-7)
    loss_fn = CrossTokenizerDistillationLoss(CAPPED, student_vocab_size=V_S, teachers=[teacher])
    leaf = student.detach().clone().requires_grad_()
    blocks = loss_fn.token_blocks(columns, [z_t.shape[1]], rows=student.shape[1])
    blockwise, _ = loss_fn(columns, HeadProjection(leaf, torch.eye(V_S, dtype=leaf.dtype)), [z_t], blocks=blocks)
    torch.testing.assert_close(blockwise.detach(), loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.autograd.grad(blockwise, leaf)[0], grad, rtol=1e-8, atol=1e-10)


def test_weights_of_now_change_nothing(stale, teacher):
    columns, student, z_t, losses, _ = stale
    sampled = torch.cat([torch.zeros_like(losses[:, :1]), -losses[:, :-1]], 1)
    same, *_ = evaluate(CAPPED, columns | {"sampled_log_probs": sampled}, student, [teacher], [z_t])
    plain, *_ = evaluate(CAPPED.model_copy(update={"importance_cap": None}), columns, student, [teacher], [z_t])
    torch.testing.assert_close(same, plain)


def test_a_batch_without_log_probabilities_is_refused(stale, teacher):
    columns, student, z_t, *_ = stale
    del columns["sampled_log_probs"]
    with pytest.raises(InputError, match="importance_cap reads the column sampled_log_probs"):
        evaluate(CAPPED, columns, student, [teacher], [z_t])
