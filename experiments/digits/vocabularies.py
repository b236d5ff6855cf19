"""Two byte-level BPE tokenizers of the same text: one splits every number, the other keeps up to three digits whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEACHER_SPECIALS = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
STUDENT_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEACHER_WORDS = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
STUDENT_WORDS = r"[^\r\nA-Za-z0-9]?[A-Za-z_]+|[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|[\r\n]+|\s+(?=\s)|\s"


def make_teacher_tokenizer(texts: Sequence[str], vocabulary: int, directory: Path) -> None:
    """Train and save the one that splits numbers into digits."""
    _save(_trained(texts, TEACHER_WORDS, vocabulary, TEACHER_SPECIALS), TEACHER_SPECIALS, directory)


def make_student_tokenizer(texts: Sequence[str], words: int, numerals: Sequence[str], directory: Path) -> None:
    """Train and save the one that keeps numbers whole.

    The numerals are added to the merges of everything else, and a word that is a token is taken as it is
    (`ignore_merges`), as in the tokenizers that are known for this: no number is cut at another place than every
    third digit, from the left.

    Args:
        texts: To train on.
        words: How many other tokens there are.
        numerals: Each becomes one token.
        directory: Where to.
    """
    base = _trained(texts, STUDENT_WORDS, words, STUDENT_SPECIALS, whole_numbers=False)
    raw = json.loads(base.to_str())
    model = raw["model"]
    model["vocab"] |= {numeral: len(model["vocab"]) + place for place, numeral in enumerate(numerals)}
    model["merges"] += [[numeral[:-1], numeral[-1]] for numeral in numerals]
    model["ignore_merges"] = True
    raw["pre_tokenizer"] = json.loads(_byte_level(STUDENT_WORDS).__getstate__())
    _save(Tokenizer.from_str(json.dumps(raw)), STUDENT_SPECIALS, directory)


def _trained(
    texts: Sequence[str], words: str, vocabulary: int, specials: dict[str, str], *, whole_numbers: bool = True
) -> Tokenizer:
    """Train a tokenizer by merges of words; with `whole_numbers` off, no merge has a digit in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _byte_level(words if whole_numbers else words.replace("[0-9]{1,3}", "[0-9]"))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level(words: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _save(tokenizer: Tokenizer, specials: dict[str, str], directory: Path) -> None:
    bos = specials["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="right", **specials
    )
    wrapped.save_pretrained(directory)
