"""Chain on what the collator makes of records: tokenizer families, normalisers, prompts, records without text."""

import pytest
import torch

from tests.support import vocabularies
from xtoken_core import schema
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher, combine_metrics
from xtoken_core.losses.masks import loss_counts

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
    collator = CrossTokenizerCollator(
        student_tokenizer=student, teacher_tokenizer=teacher, aligner=None, ctx_length_student=48, ctx_length_teacher=64
    )
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
    collator = CrossTokenizerCollator(
        student_tokenizer=student, teacher_tokenizer=teacher, aligner=None, ctx_length_student=24, ctx_length_teacher=24
    )
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
