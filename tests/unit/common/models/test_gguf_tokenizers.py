"""A tokenizer that was read from a GGUF file without its merges is refused."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from xtoken_core.errors import InputError
from xtoken_services.common.models.gguf import SAMPLE, SPACES, check_merges

FILE = Path("gemma.gguf")


def tokenizer_of(log_probability: float) -> PreTrainedTokenizerFast:
    """Return one whose words are as likely as given and whose letters have a log-probability of -3 each."""
    words = [f"{SPACES[0]}{word}" for word in SAMPLE.split()]
    letters = sorted(set("".join(words)))
    pieces = [*((letter, -3.0) for letter in letters), *((word, log_probability) for word in words)]
    backend = Tokenizer(Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_words_of_the_vocabulary_are_one_token_each() -> None:
    check_merges(tokenizer_of(-1.0), FILE)


def test_cut_words_are_refused() -> None:
    with pytest.raises(InputError, match=r"gemma\.gguf without its merges, .* is cut: convert the file"):
        check_merges(tokenizer_of(-99.0), FILE)
