"""What only a teacher reads before a text: its tokens, and that alignment and masks are of the text behind it."""

import copy
from typing import Any

import numpy as np
import pytest

from tests.support import vocabularies as v
from tests.unit.core.test_collate import CHAT, CHATML, LLAMA_STYLE
from xtoken_core import schema
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.collate_generated import Completion, CompletionCollator
from xtoken_core.config.loss import LossConfig
from xtoken_core.dataset.records import PIECE, Piece
from xtoken_core.losses.masks import loss_counts

PROMPT = "two and two: four. "
RECORDS: list[dict[str, Any]] = [
    {"text": "hello there, héllo 日本 again"},
    {"prompt": "say hello ", "completion": "hello there, héllo"},
    {"messages": CHAT},
    {"messages": [{"role": "system", "content": "be short"}, *CHAT]},
    {"text": "hello there again", PIECE: Piece(first=False, last=True)},
]


def templated(tokenizer: Any, template: str) -> Any:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def collator(prompt: str = "", kind: type[CrossTokenizerCollator] = CrossTokenizerCollator, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "student_tokenizer": templated(v.sentencepiece_bpe("legacy"), LLAMA_STYLE),
        "teacher_tokenizer": templated(v.byte_level(bos=True), CHATML),
        "aligner": None,
        "ctx_length_student": 512,
        "ctx_length_teacher": 512,
        "teacher_prompt": prompt,
    }
    return kind(**(settings | changes))


def of_rows(rows: Any, field: schema.Field) -> list[list[int]]:
    column = rows.columns[schema.field_name(field, 0)]
    values = np.frombuffer(column.values, dtype=column.dtype)
    return [values[a:b].tolist() for a, b in zip(column.offsets.tolist(), column.offsets.tolist()[1:], strict=False)]


@pytest.mark.parametrize("train_on", ["completions", "all"])
@pytest.mark.parametrize("teacher", ["bytes", "unigram"])
def test_pairs_and_masks_are_those_of_the_text_without_a_prefix(train_on: str, teacher: str) -> None:
    tokenizer = templated(v.byte_level(bos=True) if teacher == "bytes" else v.unigram(), CHATML)
    changes = {"train_on": train_on, "teacher_tokenizer": tokenizer}
    counts = loss_counts(LossConfig(), [False])
    plain, after = (collator(prompt, **changes).rows(RECORDS, counts) for prompt in ("", PROMPT))
    assert not plain.refused and not after.refused
    assert after.columns["input_ids"].values == plain.columns["input_ids"].values, "the student reads the text alone"
    ids, masks = of_rows(after, schema.TEACHER_INPUT_IDS), of_rows(after, schema.TEACHER_TOKEN_MASK)
    chunks = of_rows(after, schema.TEACHER_CHUNK_ID)
    before, known_masks = of_rows(plain, schema.TEACHER_INPUT_IDS), of_rows(plain, schema.TEACHER_TOKEN_MASK)
    for row, record in enumerate(RECORDS):
        spelled = tokenizer.decode(ids[row])
        assert PROMPT.strip() in spelled and len(ids[row]) > len(before[row])
        first = next(at for at, mask in enumerate(masks[row]) if mask)
        assert PROMPT.strip() in tokenizer.decode(ids[row][:first]), "nothing of the prefix is learnt"
        assert all(chunk < 0 for chunk in chunks[row][:first])
        learnt = [token for token, mask in zip(ids[row], masks[row], strict=True) if mask]
        known = [token for token, mask in zip(before[row], known_masks[row], strict=True) if mask]
        text = str(record.get("text", record.get("completion", "")))
        words, known_words = tokenizer.decode(learnt).split(), tokenizer.decode(known).split()
        assert words[-2:] == known_words[-2:] and "".join(text.split()[-1:]) in words[-1]
    # The first token of a text has no prediction without a prefix: its chunk can count behind one only.
    found, expected = (np.frombuffer(r.columns["kd_chunks_0"].values, dtype=np.int64) for r in (after, plain))
    assert all(0 <= more <= 1 for more in found - expected), (found, expected)


def test_a_prompt_holds_the_record_s_own_prefix_where_it_says() -> None:
    record = {"text": "hello there", "teacher_prefix": "the answer is four"}
    tokenizer = v.byte_level(bos=True)
    for prompt, start in [("", "the answer is four"), ("Hint: ", "Hint: the answer is four")]:
        rows = collator(prompt).rows([record])
        assert start + "hello there" in tokenizer.decode(of_rows(rows, schema.TEACHER_INPUT_IDS)[0])
    rows = collator("({teacher_prefix}) ").rows([record, {"text": "again"}])
    alone = collator().rows([{"text": "hello there"}, {"text": "again"}])
    assert rows.columns["input_ids"].values == alone.columns["input_ids"].values, "the student reads no prefix"
    first, second = (tokenizer.decode(ids) for ids in of_rows(rows, schema.TEACHER_INPUT_IDS))
    assert "(the answer is four) hello there" in first and "() again" in second


def test_a_prefix_that_leaves_no_room_is_refused_with_what_to_do() -> None:
    found = collator("many words " * 300).rows(RECORDS)
    assert not found.records and set(found.refused) == set(range(len(RECORDS)))
    for reason in found.refused.values():
        assert (
            "the teacher alone reads before the text leaves no room in its context_length = 512: shorten it" in reason
        )


def test_a_completion_is_compared_behind_the_teacher_s_own_words() -> None:
    made = collator(PROMPT, CompletionCollator)
    prompt = {"text": "say hello "}
    ids = made.student.proceed("hello there")
    completion = Completion(
        prompt, made.student.prompt(prompt), ids, "hello there", ends=True, finished=True, version=0
    )
    counts = loss_counts(LossConfig(), [False])
    rows = made.completion_rows([completion], counts)
    assert PROMPT + "say hello hello there" in v.byte_level(bos=True).decode(of_rows(rows, schema.TEACHER_INPUT_IDS)[0])
    without = collator("", CompletionCollator).completion_rows([completion], counts)
    assert rows.columns["kd_chunks_0"].values == without.columns["kd_chunks_0"].values
    narrow = collator("many words " * 300, CompletionCollator).completion_rows([completion], counts)
    assert not narrow.records and "leaves no room" in narrow.refused[0]
