"""The demo's tokenizers."""

import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.examples import examples
from xtoken_services.demo.run import cut_at_lines
from xtoken_services.demo.vocabularies import frequent_numbers, train_student_tokenizer, train_teacher_tokenizer

MODULES = ("argparse", "ast", "calendar", "datetime", "decimal", "ipaddress", "statistics", "tokenize")
TEXTS = [
    "def f(x):\n\tif x > 10:\r\n\t    return 0x1F + 1_000\n\n\n",
    "naïve Ärger, Ελληνικά, русский",
    "日本語のテキスト、한국어, 中文",
    "مرحبا بالعالم ١٢٣",
    "e\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2028 \ufffd \x00\x7f",
    "<0x41> ▁ a▁b Ġ Ċ  <0xE3>",
    "   ",
    " \n ",
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return [text for name in MODULES for text in cut_at_lines((library / f"{name}.py").read_text("utf-8"))]


@pytest.fixture(scope="module")
def tokenizers(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    root = tmp_path_factory.mktemp("tokenizers")
    train_teacher_tokenizer(texts, root / "teacher", vocabulary=1500)
    train_student_tokenizer(texts, root / "student", vocabulary=1000)
    return {name: AutoTokenizer.from_pretrained(root / name) for name in ("teacher", "student")}


@pytest.fixture(scope="module", params=["teacher", "student"])
def tokenizer(
    request: pytest.FixtureRequest, tokenizers: dict[str, PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    return tokenizers[request.param]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_code_and_every_script_come_back_exactly(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    for text in [*texts, *TEXTS]:
        ids = ids_of(tokenizer, text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids


@examples(50, 200)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_unicode_comes_back_exactly(tokenizers: dict[str, PreTrainedTokenizerBase], text: str) -> None:
    for tokenizer in tokenizers.values():
        if not any(token in text for token in tokenizer.all_special_tokens):
            assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_special_tokens_are_set_and_differ(tokenizer: PreTrainedTokenizerBase) -> None:
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert None not in special
    assert len(special) == 3
    assert tokenizer("x")["input_ids"] == [tokenizer.bos_token_id, *ids_of(tokenizer, "x")]


def test_vocabularies_are_as_large_as_asked_and_the_student_is_smaller(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    assert len(tokenizers["teacher"]) == 1500
    assert 900 < len(tokenizers["student"]) <= 1000


def test_the_teacher_splits_numbers_into_digits(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    vocabulary = tokenizers["teacher"].get_vocab()
    assert all(len(token) == 1 for token in vocabulary if re.search("[0-9]", token))
    assert tokenizers["teacher"].tokenize("=2048") == ["=", "2", "0", "4", "8"]


def test_the_student_keeps_frequent_numbers_whole(
    tokenizers: dict[str, PreTrainedTokenizerBase], texts: list[str]
) -> None:
    numbers = frequent_numbers(texts)
    assert {len(number) for number in numbers} == {1, 2, 3}
    student = tokenizers["student"]
    for number in numbers:
        assert student.tokenize(number) == [number]
        assert number in student.tokenize(f"x = {number}, y")


def test_the_student_has_every_byte(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    vocabulary = tokenizers["student"].get_vocab()
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(vocabulary)
    assert "<0x0A>" not in tokenizers["student"].tokenize("<0x0A>")


def test_the_student_learns_words_not_only_characters(
    tokenizers: dict[str, PreTrainedTokenizerBase], texts: list[str]
) -> None:
    size = sum(len(text.encode()) for text in texts)
    assert size / sum(len(ids_of(tokenizers["student"], text)) for text in texts) > 2.2


def test_training_again_gives_the_same_student(texts: list[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        train_student_tokenizer(texts[:150], tmp_path / name, vocabulary=600)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
