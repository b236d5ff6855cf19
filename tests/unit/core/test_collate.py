"""The collator: columns of the schema, masks that agree on both sides, rows for the queue, bad records."""

import copy

import numpy as np
import pytest
import torch

from tests.support import vocabularies as v
from tests.support.alignments import aligner_of, collator_of
from tests.support.columns import rows_of
from xtoken_core import schema
from xtoken_core.alignment import AlignmentBatch, alignment_from_flat_batch
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import InputError
from xtoken_core.losses.masks import loss_counts
from xtoken_core.tokenizing import ConversationError, TextTokenizer, tokenize_conversation

LLAMA_STYLE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "say hello there"},
    {"role": "assistant", "content": "hello there, héllo 日本 "},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "again"},
]


@pytest.fixture(scope="module")
def student():
    tokenizer = copy.copy(v.sentencepiece_bpe("legacy"))  # others share the cached one
    tokenizer.chat_template = LLAMA_STYLE
    return tokenizer


@pytest.fixture(scope="module")
def teacher():
    tokenizer = copy.copy(v.byte_level(bos=True))
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def collator(student, teacher):
    return collator_of(student, teacher, 61, 80, make_seq_div_by_student=8)


def several(student, teacher, **changes):
    other = v.unigram()
    settings = {
        "student_tokenizer": student,
        "teacher_tokenizer": [teacher, None, other],
        "aligner": [aligner_of(student, teacher), None, aligner_of(student, other)],
        "ctx_length_student": 64,
        "ctx_length_teacher": [64, None, 32],
        "make_seq_div_by_teacher": [1, None, 64],
    }
    return CrossTokenizerCollator(**settings | changes)


def trained_text(tokenizer, table, ids, mask):
    """What the trained tokens of a row spell, the tokenizer's own space left out."""
    return table.spell(ids[mask > 0]).decode()


def test_padded_columns_are_the_schemas(collator):
    out = collator([{"text": "hello world"}, {"text": "a"}, {"text": "日本 " * 100}])
    fields = (*schema.STUDENT_FIELDS, *schema.TEACHER_FIELDS, *schema.ALIGNMENT_FIELDS, schema.TRUNCATED)
    assert set(out) == {field.name for field in fields}
    assert all(str(out[field.name].dtype) == f"torch.{field.dtype}" for field in fields)
    assert out["input_ids"].shape == (3, 64)
    assert out["teacher_input_ids"].shape == (3, 80)
    assert out["truncated"].tolist() == [False, False, True]
    assert out["input_lengths"].tolist() == out["token_mask"].sum(dim=1).tolist()
    assert int(out["input_lengths"].max()) == 61
    alignment = alignment_from_flat_batch(out)
    assert torch.equal(alignment.pair_is_correct, alignment.pair_valid)
    assert int(alignment.num_chunks.min()) >= 2


def test_eos_ends_a_document_that_was_not_cut_on_both_sides(collator, student, teacher):
    out = collator([{"text": "hello"}, {"text": "word " * 200}])
    lengths, their_lengths = out["input_lengths"].tolist(), out["teacher_input_lengths"].tolist()
    assert out["input_ids"][0, lengths[0] - 1] == student.eos_token_id
    assert out["teacher_input_ids"][0, their_lengths[0] - 1] == teacher.eos_token_id
    assert out["alignment_student_chunk_id"][0, lengths[0] - 1] == out["alignment_num_chunks"][0] - 1
    assert (lengths[1], their_lengths[1]) == (61, 80)
    assert out["input_ids"][1, 60] != student.eos_token_id


def test_without_append_eos_nothing_is_added(student, teacher):
    collator = collator_of(student, teacher, 16, 16, append_eos=False)
    out = collator([{"text": "hello"}])
    assert out["input_ids"][0, : out["input_lengths"][0]].tolist() == student.encode("hello")


class WholeTextAligner:
    """An aligner of one's own: every text is one chunk."""

    def align(self, student_ids, teacher_ids, *, student_attention_mask, teacher_attention_mask, texts=None):
        one = torch.ones(len(student_ids), 1, dtype=torch.bool)
        return AlignmentBatch(
            pair_valid=one,
            pair_is_correct=one,
            student_exact_partition_mask=torch.zeros_like(student_ids, dtype=torch.bool),
            teacher_exact_partition_mask=torch.zeros_like(teacher_ids, dtype=torch.bool),
            student_chunk_id=student_attention_mask - 1,
            teacher_chunk_id=teacher_attention_mask - 1,
            num_chunks=one.sum(dim=1),
        )


def test_an_aligner_needs_nothing_but_align(student, teacher):
    records = [{"text": "hello world"}, {"prompt": "say", "completion": " hello"}, {"messages": CHAT}]
    settings = {"student_tokenizer": student, "teacher_tokenizer": teacher}
    settings |= {"ctx_length_student": 64, "ctx_length_teacher": 80}
    collator = CrossTokenizerCollator(**settings, aligner=WholeTextAligner())
    out = collator(records)
    usual = CrossTokenizerCollator(**settings, aligner=aligner_of(student, teacher))(records)
    assert all(torch.equal(out[name], usual[name]) for name in out if not name.startswith("alignment_"))
    assert torch.equal(out["alignment_student_chunk_id"], out["token_mask"] - 1)
    assert torch.equal(out["alignment_teacher_chunk_id"], out["teacher_token_mask"] - 1)
    assert collator.rows(records).records == [0, 1, 2]


def test_a_text_without_tokens_refuses_its_own_record(student):
    other = copy.copy(v.unigram(byte_fallback=False, unknown=False))
    other.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    collator = collator_of(student, other, 64, 64, aligner=None)
    bad = [
        {"text": "hello Ω"},
        {"prompt": "hello", "completion": " Ω"},
        {"prompt": "Ω", "completion": " hello"},
        {"messages": [{"role": "user", "content": "Ω"}, {"role": "assistant", "content": "hello"}]},
    ]
    good = [{"text": "hello there"}, {"prompt": "hello", "completion": " there"}]
    rows = collator.rows([good[0], *bad, good[1]])
    alone = collator.rows(good)
    assert rows.records == [0, 5]
    assert rows.refused.keys() == {1, 2, 3, 4}
    assert "teacher's tokenizer has no token for 'Ω' (U+03A9), in 'hello Ω'" in rows.refused[1]
    assert all("'Ω' (U+03A9)" in reason and "unk_id" in reason for reason in rows.refused.values())
    assert rows.columns.keys() == alone.columns.keys()
    for row, expected in zip(rows_of(rows.columns), rows_of(alone.columns), strict=True):
        assert all(np.array_equal(row[name], value) for name, value in expected.items())
    with pytest.raises(InputError, match=r"record 1 of the batch: the teacher's tokenizer has no token for 'Ω'"):
        collator([good[0], bad[0]])


def test_tokenize_batch_pads_on_the_right_to_a_multiple(student):
    ids, mask = CrossTokenizerCollator._tokenize_batch(["hello world", "a " * 50], student, 10, 8)
    assert ids.shape == mask.shape == (2, 16)
    expected = student.encode("hello world")
    assert ids[0, : len(expected)].tolist() == expected
    assert mask.sum(dim=1).tolist() == [len(expected), 10]


def test_several_teachers_are_indexed_and_the_same_tokenizer_adds_nothing(student, teacher):
    out = several(student, teacher)([{"text": "hello 日本"}, {"text": "two"}])
    same = (False, True, False)
    assert set(out) == set(schema.run_fields(same)) - {"ce_tokens", "kd_chunks_0", "kd_chunks_2"}
    assert out["teacher_2_input_ids"].shape == (2, 64)
    for index in (0, 2):
        alignment = alignment_from_flat_batch(out, index)
        assert torch.equal(alignment.pair_is_correct, alignment.pair_valid)


def test_lists_of_different_lengths_are_refused(student, teacher):
    with pytest.raises(InputError, match="ctx_length_teacher has 1 entries for 3 teachers"):
        several(student, teacher, ctx_length_teacher=[3])


def test_of_a_completion_only_the_completion_is_learnt_and_aligned(collator, student, teacher):
    record = {"prompt": "What is it? ", "completion": "the answer: 日本"}
    (row,) = rows_of(collator.rows([record]).columns)
    aligner = aligner_of(student, teacher)
    ours = trained_text(student, aligner.student, row["input_ids"], row["token_mask"])
    theirs = trained_text(teacher, aligner.teacher, row["teacher_0_input_ids"], row["teacher_0_token_mask"])
    assert ours == theirs == record["completion"]
    assert (row["alignment_0_student_chunk_id"][row["token_mask"] == 0] == -1).all()
    assert (row["alignment_0_student_chunk_id"][row["token_mask"] == 1] >= 0).all()
    assert row["input_ids"][0] == student.bos_token_id
    assert row["input_ids"][-1] == student.eos_token_id and row["token_mask"][-1] == 1


def test_of_a_conversation_only_the_answers_are_learnt_and_aligned(student, teacher):
    collator = several(student, teacher, ctx_length_student=200, ctx_length_teacher=[200, None, 200])
    rows = collator.rows([{"messages": CHAT}, {"text": "fine"}])
    assert rows.refused == {
        0: "the teacher 2's tokenizer has no chat template: it cannot take messages (set its chat_template to a chat "
        "model's directory)"
    }
    assert rows.records == [1]
    with pytest.raises(InputError, match="record 0 of the batch: the teacher 2's tokenizer has no chat template"):
        collator([{"messages": CHAT}])
    collator = collator_of(student, teacher, 200, 200)
    (row,) = rows_of(collator.rows([{"messages": CHAT}]).columns)
    aligner = aligner_of(student, teacher)
    ours = trained_text(student, aligner.student, row["input_ids"], row["token_mask"])
    theirs = trained_text(teacher, aligner.teacher, row["teacher_0_input_ids"], row["teacher_0_token_mask"])
    assert theirs == "hello there, héllo 日本again"
    assert ours == " hello there, héllo 日本 again"  # with the space before each answer that belongs to its word
    assert row["alignment_0_pair_is_correct"].all() and row["alignment_0_num_chunks"] > 8
    rendered = teacher.apply_chat_template(CHAT, tokenize=False)
    assert aligner.teacher.spell(row["teacher_0_input_ids"]).decode() == rendered.replace("<|im_start|>", "").replace(
        "<|im_end|>", ""
    )


@pytest.mark.parametrize(("alike", "append_eos"), [(True, True), (False, True), (True, False)])
def test_what_ends_an_answer_is_learnt_and_compared_with_its_like(student, teacher, alike, append_eos):
    own = teacher if alike else student
    collator = CrossTokenizerCollator(
        student_tokenizer=own, teacher_tokenizer=teacher, aligner=aligner_of(own, teacher),
        ctx_length_student=200, ctx_length_teacher=200, append_eos=append_eos,
    )  # fmt: skip
    messages = [message | {"content": message["content"].strip()} for message in CHAT]
    (row,) = rows_of(collator.rows([{"messages": messages}]).columns)
    answers = sum(message["role"] == "assistant" for message in CHAT)
    for side, name, tokenizer in (("student", "", own), ("teacher", "teacher_0_", teacher)):
        learnt = row[f"{name}token_mask"] > 0
        ends = learnt & np.isin(row[f"{name}input_ids"], list(tokenizer.added_tokens_decoder))
        assert ends.sum() == answers * append_eos
        chunks = row[f"alignment_0_{side}_chunk_id"][ends]
        assert ((chunks >= 0) == alike).all()
        assert row["alignment_0_pair_is_correct"][chunks[chunks >= 0]].all()


OPENED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""A prompt for an answer opens a thought, which a rendered answer does not have."""
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A message with a call is shown without its content."""
SHUFFLED = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
"""What comes before a message is no beginning of the whole text."""


def trained_by(template, messages):
    """The trained text of a conversation under a template, and all that stands before its first trained token."""
    tokenizer = copy.copy(v.byte_level(bos=True))
    tokenizer.chat_template = template
    text = TextTokenizer(tokenizer, "student")
    ((ids, mask),) = tokenize_conversation([text], messages)
    first = int(mask.argmax())
    return tokenizer.decode(ids[mask > 0]), tokenizer.decode(ids[:first])


def test_an_answer_is_found_behind_the_question_that_holds_its_words():
    messages = [{"role": "user", "content": "Is 4 even? Say Yes or No."}, {"role": "assistant", "content": "Yes"}]
    trained, before = trained_by(OPENED, messages)
    assert trained == "Yes" and before.endswith("No.<|Assistant|>")


def test_the_words_of_an_answer_that_is_not_shown_are_not_looked_for_in_other_messages():
    call = {"role": "assistant", "content": "search", "tool_calls": [{"function": {"name": "f"}}]}
    result, last = {"role": "tool", "content": "no search results"}, {"role": "assistant", "content": "done"}
    trained, _ = trained_by(CALLS, [{"role": "user", "content": "find it"}, call, result, last])
    assert trained == "done<|im_end|>"


def test_an_answer_that_cannot_be_told_from_another_message_is_refused():
    question, answer = {"role": "user", "content": "Yes or no?"}, {"role": "assistant", "content": "Yes"}
    with pytest.raises(ConversationError, match="no assistant message that every chat template shows"):
        trained_by(SHUFFLED, [question, answer])
    assert trained_by(SHUFFLED, [question, answer | {"content": "Certainly"}])[0] == "Certainly"


@pytest.mark.parametrize(("value", "mask"), [(None, 1.0), (0.5, 0.5), (0, 0.0)])
def test_a_loss_multiplier_is_the_mask_and_null_counts_as_missing(collator, value, mask):
    record = {"text": "fine", "loss_multiplier": value}
    assert collator([record])["sample_mask"].tolist() == [mask]
    (row,) = rows_of(collator.rows([record]).columns)
    assert float(row["sample_mask"]) == 1, "runs do not read it"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "x", [1]])
def test_a_loss_multiplier_that_is_no_weight_is_refused(collator, value):
    with pytest.raises(InputError, match=r"record 0 of the batch: loss_multiplier = .* is no number from 0 up"):
        collator([{"text": "fine", "loss_multiplier": value}])


def test_a_conversation_without_an_answer_is_refused(collator):
    result = collator.rows([{"messages": CHAT[:1]}, {"text": "fine"}])
    assert result.refused == {0: "no assistant message that every chat template shows as it is"}
    assert result.records == [1]


def test_rows_have_their_own_lengths_and_all_columns(student, teacher):
    collator = several(student, teacher)
    same = (False, True, False)
    records = [{"text": text} for text in v.TEXTS.values()]
    rows = rows_of(collator.rows(records, loss_counts(LossConfig(mode="p_kl"), same)).columns)
    padded = collator(records)
    assert len(rows) == len(records)
    for at, row in enumerate(rows):
        assert set(row) == set(schema.run_fields(same))
        for name, (axis, place) in schema.axis_of(3).items():
            if name not in row:
                continue
            value = row[name]
            length = {
                "student": row["input_lengths"],
                "teacher": row.get(f"teacher_{place}_input_lengths"),
                "pair": row.get(f"alignment_{place}_num_chunks"),
            }.get(axis)
            assert value.shape == (() if axis == "sample" else (int(length),)), name
            if name in padded:
                whole = padded[name][at].numpy()
                assert np.array_equal(value, whole if axis == "sample" else whole[: int(length)]), name
        assert row["ce_tokens"] == row["input_lengths"] - 1
        assert 0 < row["kd_chunks_0"] <= row["alignment_0_num_chunks"]


def test_rows_do_not_depend_on_their_company(student, teacher):
    collator = several(student, teacher)
    counts = loss_counts(LossConfig(mode="p_kl"), (False, True, False))
    records = [{"text": text} for text in v.TEXTS.values()]
    together = rows_of(collator.rows(records, counts).columns)
    for record, row in zip(records, together, strict=True):
        (alone,) = rows_of(collator.rows([record], counts).columns)
        assert alone.keys() == row.keys()
        assert all(np.array_equal(alone[name], value) for name, value in row.items())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": ""}, "empty text"),
        ({"other": "x"}, "no field 'text'"),
        ({"text": b"\xff\xfe"}, "invalid UTF-8 at byte 0"),
    ],
    ids=["empty", "missing", "not UTF-8"],
)
def test_a_bad_record_has_a_reason_and_harms_no_other(collator, record, reason):
    rows = collator.rows([{"text": "good"}, record, {"text": "good"}])
    assert rows.records == [0, 2] and reason in rows.refused[1]
    good, again = rows_of(rows.columns)
    assert np.array_equal(good["input_ids"], again["input_ids"])


def test_in_a_padded_batch_an_empty_text_is_masked_and_other_bad_records_are_named(collator):
    out = collator([{"text": ""}, {"text": "a", "loss_multiplier": 0.5}])
    assert out["sample_mask"].tolist() == [0.0, 0.5]
    with pytest.raises(InputError, match="record 1 of the batch: no field 'text'"):
        collator([{"text": "a"}, {}])


def test_no_records_make_no_rows(collator):
    rows = collator.rows([])
    assert (rows.records, rows.columns, rows.refused) == ([], {}, {})


def test_rows_without_a_chunk(student, teacher):
    """A text of which a context leaves no common boundary."""
    collator = collator_of(student, teacher, 0, 1)
    (row,) = rows_of(collator.rows([{"text": "hello"}]).columns)
    assert row["alignment_0_num_chunks"] == 0
    assert row["alignment_0_pair_valid"].size == row["input_ids"].size == 0


def test_a_single_teacher_is_numbered_inside_only(collator):
    assert schema.without_numbers(collator.padded([{"text": "a"}])).keys() == collator([{"text": "a"}]).keys()
    assert set(collator.rows([{"text": "a"}], loss_counts(LossConfig(mode="p_kl"), (False,))).columns) == set(
        schema.run_fields((False,))
    )
