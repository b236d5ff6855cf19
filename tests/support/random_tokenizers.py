"""Tokenizers and texts drawn by seed: every model, normaliser and pre-tokenizer of the `tokenizers` library."""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.vocabularies import fast

_FRAGMENTS = (
    "the quick Brown FOX jumps over lazy dogs now aa aaa x 1 234 5.6 "
    "cafe\u0301 caf\u00e9 e\u0323\u0301 e\u0301\u0323 a\u030a \u212b A\u0308 \u00dc q\u0307\u0323 "
    "\u1112\u1161\u11ab \ud55c \uac00\u11a8 \uac01 \u1100\u1161 \uc548\ub155 \u314e "
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f\u064c \u0622 \u0627\u0653 "
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u0928\u093f \u0915\u094d\u0937 \u0958 \u0e2a\u0e27\u0e31 \u0e33 "
    "\u65e5\u672c\u8a9e \u4e2d\u6587 \uff11\uff21 \u304b\u3099 \u304c \uff76\uff9e \u3002 "
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f9d1\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f "
    "\ufb01 \u00bd \u2460 \u00b2 \u0130 \u01c5 \u00df \u03a3\u03c2 \u2126 \u2026 \u3392 "
    "\u0301 \u0323 \u200b \ufeff \u00ad \x00 \x01 \x1f \x7f \u0085 \ufffd "
    ". , !? 's -- ( _ # ## \u2581 \u0120 \u201c < > $ ab ba"
)
FRAGMENTS = _FRAGMENTS.split(" ")
SPACES = ("", "", " ", " ", " ", "  ", "    ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028")


def random_text(draw: random.Random, pieces: int = 8) -> str:
    """A text of a few fragments, with or without spaces between and around them."""
    text = draw.choice(SPACES)
    for _ in range(draw.randint(0, pieces)):
        text += draw.choice(FRAGMENTS[:15] if draw.random() < 0.35 else FRAGMENTS) + draw.choice(SPACES)
    return text


@cache
def _character_map() -> bytes:
    import io

    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to train on"] * 20),
        model_writer=written,
        vocab_size=24,
        model_type="char",
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(written.getvalue())
    return bytes(model.normalizer_spec.precompiled_charsmap)


def _normalizer(draw: random.Random) -> Any:
    return draw.choice(
        [
            lambda: None,
            normalizers.NFC,
            normalizers.NFC,
            normalizers.NFD,
            normalizers.NFKC,
            normalizers.NFKD,
            normalizers.Lowercase,
            normalizers.StripAccents,
            lambda: normalizers.BertNormalizer(
                clean_text=draw.random() < 0.5,
                handle_chinese_chars=draw.random() < 0.5,
                strip_accents=draw.choice([None, True, False]),
                lowercase=draw.random() < 0.5,
            ),
            lambda: normalizers.Strip(left=draw.random() < 0.7, right=draw.random() < 0.7),
            lambda: normalizers.Replace(
                draw.choice(["a", "aa", "e", "the", " ", "\u0301"]), draw.choice(["", "b", "xyz", "\u2581", "e"])
            ),
            lambda: normalizers.Replace(
                Regex(draw.choice([" {2,}", "[0-9]", "a+", "o"])), draw.choice([" ", "0", "", "ab"])
            ),
            lambda: normalizers.Prepend(draw.choice(["\u2581", " ", "x", "ab"])),
            normalizers.Nmt,
            normalizers.ByteLevel,
            lambda: normalizers.Precompiled(_character_map()),
        ]
    )()


def _pre_tokenizer(draw: random.Random) -> Any:
    behaviors = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
    return draw.choice(
        [
            lambda: None,
            lambda: pre_tokenizers.ByteLevel(add_prefix_space=draw.random() < 0.4, use_regex=draw.random() < 0.7),
            lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
            lambda: pre_tokenizers.Metaspace(
                prepend_scheme=draw.choice(["always", "first", "never"]), split=draw.random() < 0.5
            ),
            lambda: pre_tokenizers.Metaspace(replacement="_", prepend_scheme=draw.choice(["always", "never"])),
            pre_tokenizers.Whitespace,
            pre_tokenizers.WhitespaceSplit,
            pre_tokenizers.BertPreTokenizer,
            lambda: pre_tokenizers.Digits(individual_digits=draw.random() < 0.5),
            lambda: pre_tokenizers.Punctuation(draw.choice(behaviors)),
            lambda: pre_tokenizers.Split(
                Regex(draw.choice([r"\s+", "[aeiou]", r"\p{L}+", "ab"])), draw.choice(behaviors)
            ),
            lambda: pre_tokenizers.Split(draw.choice([" ", "a", "e"]), draw.choice(behaviors)),
            lambda: pre_tokenizers.CharDelimiterSplit(draw.choice([" ", "x", "."])),
            pre_tokenizers.UnicodeScripts,
            lambda: pre_tokenizers.FixedLength(length=draw.randint(1, 7)),
        ]
    )()


_ENCODING = (normalizers.ByteLevel, pre_tokenizers.ByteLevel)


def _sequence(draw: random.Random, one: Any, join: Any) -> tuple[Any, list[Any]]:
    drawn = [part for part in (one(draw) for _ in range(draw.choice([1, 1, 1, 2, 3]))) if part is not None]
    # Bytes that are written as characters are written so once, behind everything else that reads characters.
    parts = [part for n, part in enumerate(drawn) if not isinstance(part, _ENCODING) or n == len(drawn) - 1]
    signs = [part for part in parts if isinstance(part, pre_tokenizers.Metaspace)]
    if signs:
        parts = [
            part for part in parts if part is signs[0] or not isinstance(part, (pre_tokenizers.Metaspace, *_ENCODING))
        ]
    return (join(parts) if len(parts) > 1 else parts[0] if parts else None), parts


@dataclass(frozen=True)
class RandomTokenizer:
    """A tokenizer and what it was made of.

    Attributes:
        fast: As `transformers` wraps it.
        bare: A copy without its normaliser.
        steps: Its normalisers, in order.
        description: Its parts, for a message.
        encodes_bytes: Token strings have a character for each byte.
        sign: What stands for a space in token strings.
        continues: What marks a token that continues a word.
        suffix: What marks the end of a word.
        drops: It leaves out what it does not know.
    """

    fast: PreTrainedTokenizerFast
    bare: Tokenizer
    steps: tuple[Any, ...]
    description: str
    encodes_bytes: bool
    sign: str
    continues: str = ""
    suffix: str = ""
    drops: bool = False


def _pieces(draw: random.Random, words: list[str], count: int) -> list[str]:
    """Stretches of words, of two characters at least."""
    found: dict[str, None] = {}
    for _ in range(count):
        word = draw.choice(words)
        begin = draw.randrange(len(word))
        found[word[begin : begin + draw.randint(2, 8)]] = None
    return [piece for piece in found if len(piece) > 1]


def _model(
    draw: random.Random, kind: str, words: list[str], characters: list[str], *, drops: bool, encodes: bool
) -> tuple[Any, str]:
    """A model over the pre-tokens of a corpus, and what it writes behind a word."""
    count, fuse = draw.choice([20, 100, 300]), draw.random() < 0.5
    suffix = "</w>" if kind == "BPE" and draw.random() < 0.15 else ""
    falls_back = (
        draw.random() < 0.4 and not encodes and not suffix
    )  # byte tokens of `</w>` or of stand-ins mean nothing
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if falls_back else []
    if kind == "WordLevel":
        return models.WordLevel(_numbered([*draw.sample(sorted(set(words)), min(count, len(set(words))))]), "<unk>"), ""
    if kind == "WordPiece":
        starts = [piece for piece in _pieces(draw, words, count) if draw.random() < 0.5]
        inner = ["##" + piece for piece in [*_pieces(draw, words, count), *characters]]
        return models.WordPiece(_numbered([*characters, *starts, *inner]), unk_token="<unk>"), ""
    if kind == "Unigram":
        pieces = [*characters, *_pieces(draw, words, count), *fallback]
        scored = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
        scored += [(piece, -draw.uniform(1, 12)) for piece in dict.fromkeys(pieces)]
        return models.Unigram(scored, unk_id=0, byte_fallback=bool(fallback)), ""
    split = [[*word[:-1], word[-1] + suffix] for word in draw.sample(words, min(len(words), 150))]
    base = [*characters, *(char + suffix for char in characters)]
    merges: dict[tuple[str, str], None] = {}
    for _ in range(count):
        word = draw.choice(split)
        if len(word) < 2:
            continue
        at = draw.randrange(len(word) - 1)
        pair = word[at], word[at + 1]
        if pair[0] in base and pair[1] in base and "".join(pair) not in base:
            merges[pair] = None
            base.append("".join(pair))
        word[at : at + 2] = ["".join(pair)]
    options: dict[str, Any] = {} if drops else {"unk_token": "<unk>", "fuse_unk": fuse}
    options |= {"end_of_word_suffix": suffix} if suffix else {}
    vocab = _numbered([*base, *fallback])
    return models.BPE(vocab=vocab, merges=list(merges), byte_fallback=bool(fallback), **options), suffix


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(dict.fromkeys(["<unk>", "<s>", "</s>", *pieces]))}


def random_tokenizer(seed: int) -> RandomTokenizer:
    """The tokenizer of a seed: a small vocabulary over the pre-tokens of texts of the same fragments."""
    draw = random.Random(seed)
    kind = draw.choice(["BPE", "BPE", "BPE", "Unigram", "WordPiece", "WordLevel"])
    drops = kind == "BPE" and draw.random() < 0.3
    normalizer, steps = _sequence(draw, _normalizer, normalizers.Sequence)
    pre_tokenizer, splits = _sequence(draw, _pre_tokenizer, pre_tokenizers.Sequence)
    if any(isinstance(part, normalizers.ByteLevel) for part in steps):
        pre_tokenizer, splits = None, []
    words: list[str] = []
    for text in [random_text(draw, 12) for _ in range(60)]:
        normal = normalizer.normalize_str(text) if normalizer is not None else text
        words += [w for w, _ in pre_tokenizer.pre_tokenize_str(normal)] if pre_tokenizer is not None else [normal]
    words = [word for word in words if word] or ["a"]
    encodes = any(isinstance(part, _ENCODING) for part in (*steps, *splits))
    every = sorted(set("".join(words)) | (set(pre_tokenizers.ByteLevel.alphabet()) if encodes else set()))
    known = 1.0 if encodes else draw.choice([1.0, 1.0, 0.97, 0.8])
    kept = [char for char in every if draw.random() < known]
    model, suffix = _model(draw, kind, words, kept, drops=drops, encodes=encodes)
    tokenizer = Tokenizer(model)
    bare = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = bare.pre_tokenizer = pre_tokenizer
    names = {} if drops or draw.random() < 0.2 else {"unk_token": "<unk>"}
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return RandomTokenizer(
        fast=fast(tokenizer, bos_token="<s>", eos_token="</s>", **names),
        bare=bare,
        steps=tuple(steps),
        description=f"{kind} {[str(part)[:60] for part in steps]} {[str(part)[:60] for part in splits]} {suffix}",
        encodes_bytes=encodes,
        sign=next((part.replacement for part in splits if isinstance(part, pre_tokenizers.Metaspace)), " "),
        continues="##" if kind == "WordPiece" else "",
        suffix=suffix,
        drops=drops,
    )
