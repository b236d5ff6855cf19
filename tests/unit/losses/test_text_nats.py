"""Losses of both sides on the same text, on what the collator makes of records, against sums token by token."""

import pytest
import torch

from tests.support import vocabularies
from tests.support.chain_batch import chain_on
from tests.support.packed import packed_whole
from tests.unit.losses.loss_cases import V_S, loss_of, make_case
from xtoken_core.alignment.tables import token_table
from xtoken_core.config import LossConfig
from xtoken_core.losses import HeadProjection
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.losses.teacher_scores import TextNats
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings

RECORDS = [
    {"text": "The quick brown fox: 1,234.56 metres"},
    {"prompt": "two  spaces\n", "completion": "日本語の文章 👍🏿 number 4567"},
    {"text": ""},
    {"text": "lowest 2024", "loss_multiplier": 0.0},
]


@pytest.fixture(scope="module")
def chain():
    """The run's loss, both tokenizers' pieces, a padded batch of real text and logits of both sides."""
    loss, _, batch, logits = chain_on(RECORDS)
    tokenizers = vocabularies.byte_level(), vocabularies.unigram()
    return loss, [[len(piece) for piece in token_table(tokenizer).pieces] for tokenizer in tokenizers], batch, logits


def measured(loss, batch, student, teachers, lengths):
    text = TextNats(loss.losses, batch, teachers, torch.tensor(lengths, dtype=torch.float32))
    loss.observer = text.observe
    loss(batch, student, teachers)
    return {name: value.item() for name, value in text.metrics.items()}


def sums(batch, logits, lengths, ids, chunks):
    """Nats and bytes of one side's tokens in the chunks that are compared, with a loop over them."""
    nats = size = 0
    others = [batch[f"alignment_0_{side}_chunk_id"] for side in ("student", "teacher")]
    for b, position in torch.nonzero(batch[chunks] >= 0).tolist():
        chunk = int(batch[chunks][b, position])
        whole = all(int(side[b, 0]) != chunk for side in others)  # nothing predicts a sample's first token
        if batch["sample_mask"][b] and batch["alignment_0_pair_is_correct"][b, chunk] and whole:
            token = int(batch[ids][b, position])
            nats -= float(torch.log_softmax(logits[b, position - 1], -1)[token])
            size += lengths[token]
    return nats, size


def test_both_sides_are_measured_on_the_text_of_the_compared_chunks(chain):
    loss, pieces, batch, logits = chain
    found = measured(loss, batch, logits[0], logits[1:], pieces[0])
    student, size = sums(batch, logits[0], pieces[0], "input_ids", "alignment_0_student_chunk_id")
    teacher, _ = sums(batch, logits[1], pieces[1], "teacher_0_input_ids", "alignment_0_teacher_chunk_id")
    assert found == pytest.approx({"text_nats_t0": student, "text_teacher_nats_t0": teacher, "text_bytes_t0": size})
    texts = [record.get("text") or record["prompt"] + record["completion"] for record in RECORDS[:2]]
    assert size > 0.8 * sum(len(text.encode()) for text in texts)


def test_every_form_of_a_teacher_and_of_a_batch_has_the_same_sums(chain):
    loss, pieces, batch, logits = chain
    whole = measured(loss, batch, logits[0], logits[1:], pieces[0])
    width = loss.losses[0].vocab_size
    cut = logits[1][..., :width]
    expected = measured(loss, batch, logits[0], [cut], pieces[0])
    targets = predicted_ids(batch["teacher_0_input_ids"])
    listed = largest_logits(cut, targets, TopKSettings(4, width, 1.0))
    heads = [HeadProjection(x, torch.eye(x.shape[-1], dtype=x.dtype)) for x in logits]
    assert measured(loss, batch, logits[0], [listed], pieces[0]) == pytest.approx(expected)
    assert measured(loss, batch, heads[0], heads[1:], pieces[0]) == pytest.approx(whole)
    packed, row = packed_whole(batch, logits)
    assert measured(loss, packed, row[0], row[1:], pieces[0]) == pytest.approx(whole)
    halves = [{name: column[some] for name, column in batch.items()} for some in (slice(0, 1), slice(1, 4))]
    parts = [
        measured(loss, half, logits[0][some], [logits[1][some]], pieces[0])
        for half, some in zip(halves, (slice(0, 1), slice(1, 4)), strict=True)
    ]
    assert {name: parts[0][name] + parts[1][name] for name in whole} == pytest.approx(whole)


def test_a_teacher_with_the_students_tokenizer_is_measured_on_the_next_tokens():
    case = make_case(same_tokenizer=(True, True), sample_mask=(1.0, 1.0, 1.0, 0.0))
    loss = loss_of(case, LossConfig())
    found = measured(loss, case.batch, case.student_logits, case.teacher_logits, [2] * V_S)
    ids, mask = case.batch["input_ids"][:, 1:], case.batch["token_mask"][:, 1:] * case.batch["sample_mask"][:, None]
    for teacher, logits in enumerate(case.teacher_logits):
        for name, x in ((f"text_nats_t{teacher}", case.student_logits), (f"text_teacher_nats_t{teacher}", logits)):
            nats = -torch.log_softmax(x[:, :-1], -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            assert found[name] == pytest.approx(float((nats * mask).sum()))
        assert found[f"text_bytes_t{teacher}"] == 2 * mask.sum()


def test_a_loss_without_chunks_names_no_text():
    case = make_case()
    loss = loss_of(case, LossConfig(mode="alm"))
    loss.losses[0].chunks = lambda batch: None
    assert TextNats(loss.losses, case.batch, case.teacher_logits, torch.ones(V_S)).metrics == {}
