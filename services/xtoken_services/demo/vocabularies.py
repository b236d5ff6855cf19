"""The demo's two tokenizers, trained on its text: BPE over single digits, Unigram over whole numbers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEACHER_VOCABULARY = 4096
STUDENT_VOCABULARY = 2048
_TRAINING_BYTES = 2_000_000
_NUMBER_COUNT = 12
_NUMBER_SCORE = -4.0
_CHARACTER_COUNT = 20
_BYTE_SCORE = -30.0
_LONGEST_PIECE = 16
_SPECIAL_TEACHER = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
_SPECIAL_STUDENT = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
# A run of up to three digits, a word with its space, other signs with theirs, line breaks, other white space.
_STUDENT_WORDS = r"[0-9]{1,3}| ?[\p{L}_]+| ?[^\s\p{L}_0-9]+|[\r\n]+|\s+(?=\s)|\s"


def training_texts(corpus: Path, limit: int = _TRAINING_BYTES) -> list[str]:
    """Return the first documents of a `train.jsonl`, up to about this many characters."""
    texts, size = [], 0
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if size >= limit:
                break
    return texts


def train_teacher_tokenizer(texts: Sequence[str], directory: Path, *, vocabulary: int = TEACHER_VOCABULARY) -> None:
    """Train a byte-level BPE that splits every number into its digits, saved as a Hugging Face directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIAL_TEACHER.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _save(tokenizer, _SPECIAL_TEACHER, directory)


def train_student_tokenizer(texts: Sequence[str], directory: Path, *, vocabulary: int = STUDENT_VOCABULARY) -> None:
    """Train a Unigram with byte fallback that keeps numbers of up to three digits whole, saved the same way.

    The seed vocabulary is made of byte-pair merges; then pieces are scored by how often the likeliest segmentation
    uses them and the least used dropped, in turn (hard EM; Kudo, "Subword Regularization", 2018, section 3.2).
    A space is written as itself, so every piece but the 256 byte pieces spells its own text and decoding is exact.
    """
    fixed = [(text, 0.0) for text in _SPECIAL_STUDENT.values()]
    fixed += [(f"<0x{byte:02X}>", _BYTE_SCORE) for byte in range(256)]
    fixed += [(number, _NUMBER_SCORE) for number in frequent_numbers(texts)]
    room = vocabulary - len(fixed)
    counts = _count_tokens(_seed(texts, 2 * room), texts)
    for keep in (3 * room // 2, 5 * room // 4, room):
        tokenizer = _unigram([*fixed, *_scored(counts, keep)])
        counts = _count_tokens(tokenizer, texts)
    tokenizer = _unigram([*fixed, *_scored(counts, room)])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    _save(tokenizer, _SPECIAL_STUDENT, directory)


def _seed(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Return byte-pair merges over characters, within the student's words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_STUDENT_WORDS), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, max_token_length=_LONGEST_PIECE, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _unigram(pieces: Sequence[tuple[str, float]]) -> Tokenizer:
    unknown = list(_SPECIAL_STUDENT).index("unk_token")
    tokenizer = Tokenizer(models.Unigram(list(pieces), unk_id=unknown, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_STUDENT_WORDS), "isolated")
    return tokenizer


def _count_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Counter[str]:
    """Count the uses of each piece, without numbers and byte pieces."""
    counts = Counter(token for encoding in tokenizer.encode_batch(texts) for token in encoding.tokens)
    return Counter({t: n for t, n in counts.items() if not re.fullmatch(r"[0-9]+|<0x[0-9A-F]{2}>|<unk>", t)})


def _scored(counts: Counter[str], keep: int) -> list[tuple[str, float]]:
    """Return the most used pieces with their log-frequencies, and all single characters that are not rare."""
    single = [item for item in counts.items() if len(item[0]) == 1 and item[1] >= _CHARACTER_COUNT]
    longer = [item for item in counts.items() if len(item[0]) > 1]
    kept = sorted(single, key=_rank)[:keep] + sorted(longer, key=_rank)[: max(0, keep - len(single))]
    total = sum(count for _, count in kept)
    return [(piece, math.log(count / total)) for piece, count in kept]


def _rank(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def frequent_numbers(texts: Sequence[str]) -> list[str]:
    """Return the digits, and every group of two or three digits that the text often has, in order.

    The tokenizer cuts digits off from everything else and groups them by three from the left. So a number piece
    competes with the ways to split it and nothing more, and equal scores make it win against all of them.
    """
    counts = Counter(number for text in texts for number in re.findall(r"[0-9]{1,3}", text))
    often = {number for number, count in counts.items() if count >= _NUMBER_COUNT}
    return sorted(often | set("0123456789"))


def _save(tokenizer: Tokenizer, special: dict[str, str], directory: Path) -> None:
    bos = special["bos_token"]
    start = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.post_processor = start
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="right", **special
    )
    wrapped.save_pretrained(directory)
