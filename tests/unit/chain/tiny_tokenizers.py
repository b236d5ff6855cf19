"""Byte-level BPE tokenizers of a few dozen tokens, and the same in plain Python."""

import random
from collections.abc import Callable
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from xtoken_core.alignment.token_decoders import byte_alphabet

BYTE_OF = byte_alphabet()
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}
END = "<e>"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "words": r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "digits": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "pairs": r"'s|'re| ?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "threes": LLAMA_3,
    "none": r"[\s\S]+",
}
"""Splits into words: digits are grouped by one, by two, by three, or not at all."""


@cache
def splitter(pattern: str):
    return pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated")


def split_words(text: str, pattern: str) -> list[bytes]:
    return [word.encode() for word, _ in splitter(pattern).pre_tokenize_str(text)]


class TinyTokenizer:
    """A byte-level BPE; every byte of its alphabet is a token, then one per merge, then the end of text."""

    ends = True  # whether a token has ended is compared

    def __init__(self, alphabet: bytes, merges: list[tuple[bytes, bytes]], pattern: str):
        self.pattern = pattern
        pieces = [bytes([byte]) for byte in sorted(set(alphabet))]
        self.merges = []
        for a, b in merges:
            if a in pieces and b in pieces and a + b not in pieces:
                pieces.append(a + b)
                self.merges.append((a, b))
        self.vocab = [*pieces, b""]
        self.end = len(pieces)
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self.fast = self._fast()

    def __repr__(self) -> str:
        alphabet = b"".join(piece for piece in self.vocab if len(piece) == 1)
        return f"TinyTokenizer({alphabet}, {self.merges}, {self.pattern!r})"

    def bytes_of(self, token: int) -> bytes:
        return self.vocab[token]

    @cache  # noqa: B019 - lives as long as a test
    def _encode(self, text: bytes) -> tuple[int, ...]:
        try:
            words = split_words(text.decode(), self.pattern)
        except UnicodeDecodeError:
            words = [text]
        return tuple(i for word in words for i in self._merged(word))

    def cuts(self, token: int, text: bytes) -> bool:
        """Whether the tokenizer cuts the token's text and another after the token."""
        own = self.bytes_of(token)
        try:
            both = (own + text).decode()
        except UnicodeDecodeError:
            return self._cuts_bytes(own, text)[:1] == (token,)
        return self.fast.backend_tokenizer.encode(both).ids[:1] == [token]

    def _cuts_bytes(self, own: bytes, text: bytes) -> tuple[int, ...]:
        """Parts of characters: the whole characters beside the boundary decide about a split into words."""
        before, after = whole(own, -1), whole(text, 1)
        if before and after:
            words, alone = (split_words(string, self.pattern) for string in (before + after, before))
            if words[: len(alone)] == alone:
                return (self.ids[own],)
            if words[: len(alone) - 1] != alone[:-1] or not words[len(alone) - 1].startswith(alone[-1]):
                return ()
            if len(words) > len(alone):  # the word ends before the text does
                return self._merged(own[: len(own) - len(before.encode())] + b"".join(words[: len(alone)]))
        return self._merged(own + text)

    def encode(self, text: bytes) -> list[int]:
        return list(self._encode(text))

    def _merged(self, word: bytes) -> tuple[int, ...]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, len(self.ranks)), i) for i, pair in enumerate(zip(parts, parts[1:]))]  # noqa: B905, RUF007
            rank, at = min(ranked)
            if rank == len(self.ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(self.ids[part] for part in parts)

    def _model(self, name: Callable[[bytes], str]) -> models.Model:
        vocab = {name(piece): i for piece, i in self.ids.items()}
        return models.BPE(vocab=vocab, merges=[(name(a), name(b)) for a, b in self.merges])

    def _fast(self) -> PreTrainedTokenizerFast:
        def name(piece: bytes) -> str:
            return "".join(CHAR_OF[byte] for byte in piece)

        tokenizer = Tokenizer(self._model(name))
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter(self.pattern), bytes_])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
        )


DIGITS_AND_MARKS = b"12 .'s"
BY_THREE = TinyTokenizer(DIGITS_AND_MARKS, [(b"1", b"2"), (b"12", b"1"), (b"'", b"s"), (b".", b"'")], "threes")
UNGROUPED = TinyTokenizer(DIGITS_AND_MARKS, [(b"1", b"2"), (b"1", b"1"), (b"s", b"s"), (b"'", b"s")], "none")
"""Behind "12" of the first, "12" of the second is no token: the word is "121"."""


class TinyUnigram(TinyTokenizer):
    """The same tokens with random scores; a word is cut where the sum of its tokens' scores is largest."""

    ends = False

    def __init__(self, alphabet: bytes, merges: list[tuple[bytes, bytes]], pattern: str, seed: int):
        self.seed = seed
        super().__init__(alphabet, merges, pattern)

    def cuts(self, token: int, text: bytes) -> bool:
        return self.encode(self.bytes_of(token) + text)[:1] == [token]

    def _scores(self) -> list[float]:
        rng = random.Random(self.seed)
        return [-rng.uniform(1, 4) for _ in self.vocab]

    def _merged(self, word: bytes) -> tuple[int, ...]:
        scores = self._scores()
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for end in range(1, len(word) + 1):
            cuts = [(begin, self.ids[piece]) for begin in range(end) if (piece := word[begin:end]) in self.ids]
            # Of equal sums the library keeps the one with the longest last token, which `max` finds first.
            ways = [(best[begin][0] + scores[i], (*best[begin][1], i)) for begin, i in cuts]
            best.append(max(ways, key=lambda way: way[0]))
        return best[-1][1]

    def _model(self, name: Callable[[bytes], str]) -> models.Model:
        scored = [
            (name(piece) if piece else END, score) for piece, score in zip(self.vocab, self._scores(), strict=True)
        ]
        return models.Unigram(scored, unk_id=self.end)


def whole(data: bytes, step: int) -> str:
    """The longest beginning (step 1) or end (step -1) that is text."""
    for n in range(len(data), 0, -1):
        try:
            return (data[:n] if step == 1 else data[-n:]).decode()
        except UnicodeDecodeError:
            pass
    return ""
