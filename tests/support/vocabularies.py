"""Tokenizers for tests: the real vocabularies that mistral-common carries, and small ones of every other family."""

import base64
import io
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertGenerationTokenizer,
    ByT5Tokenizer,
    CanineTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from xtoken_core.alignment.token_decoders import byte_alphabet

TEKKEN = "tekken_240911.json"
SENTENCEPIECE = "tokenizer.model.v1"

TEXTS = {
    "english": "The quick brown fox jumps over the lazy dog. It's 1,234.56 metres -- isn't it?\n\nYes; “quite”.",
    "code": "def f(x: int) -> str:\n    if x >= 10:\n\t\treturn f'{x:>8}'  # ok\n    return '' or \"\\n\"\n",
    "chinese": "日本語の文章と中文文本，混合在一起。統計２０２４年、１２３４５！",
    "korean": "안녕하세요, 세계! 자모: ㄱㄴㄷ",
    "arabic": "مرحبا بالعالم، كيف حالك؟ الأرقام ١٢٣ والتشكيل: مُحَمَّدٌ",
    "hebrew": "שלום עולם, בְּרֵאשִׁית",
    "emoji": "👨‍👩‍👧‍👦 family, 🧑🏽‍💻 coder, 🇩🇪 flag, ❤️‍🔥 heart, 👍🏿!",
    "combining": "e\u0301 a\u0308\u0323 n\u0303o\u0302 Z\u0351\u036b\u0343algo",
    "hindi": "नमस्ते दुनिया, क्षत्रिय",
    "thai": "สวัสดีชาวโลก",
    "rare": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀 \u200d \ufeff \u00a0 \u3000 ﬁ ½ ①",
    "spaces": "  two  spaces\t\ttabs \n \n  end  ",
    "one": "a",
}

CORPUS = [*TEXTS.values(), "low lower lowest new newer newest wide wider", "numbers 123 4567 89 and 2024"] * 3


def carried(name: str) -> Path:
    """Return a file that mistral-common carries; a test that reads one is skipped where it is not installed."""
    return Path(pytest.importorskip("mistral_common").__file__).parent / "data" / name


def fast(tokenizer: Tokenizer, **names: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def _starting_with(tokenizer: Tokenizer, token: str) -> None:
    index = tokenizer.token_to_id(token)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, index)]
    )


def _merge(piece: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """The two tokens that byte-pair merging joins last to make this one."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        joined = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        at = min(range(len(joined)), key=joined.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)


@cache
def tekken(size: int = 130072, pattern: str | None = None, joined: int = 0) -> PreTrainedTokenizerFast:
    """The carried byte-level BPE as a fast tokenizer: `<unk>`, `<s>`, `</s>`, `<pad>`, then `size` tokens.

    Args:
        size: How many tokens it has.
        pattern: How text is split into words before merging; None: as the carried one does.
        joined: How many of them, the last ones, are not carried but join two neighbours that are: nobody else has them.
    """
    document = json.loads(carried(TEKKEN).read_bytes())
    every = [base64.b64decode(entry["token_bytes"]) for entry in document["vocab"]]
    known, pieces = set(every), every[: size - joined]
    neighbours = {a + b: (a, b) for a, b in itertools.pairwise(pieces[256:]) if a + b not in known}
    pairs = dict(itertools.islice(neighbours.items(), joined))
    carried_pieces, pieces = pieces, [*pieces, *pairs]
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    printable = {byte: char for char, byte in byte_alphabet().items()}

    def name(piece: bytes) -> str:
        return "".join(printable[byte] for byte in piece)

    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    vocab = {token: i for i, token in enumerate(specials)}
    vocab |= {name(piece): rank + len(specials) for piece, rank in ranks.items()}
    merges = [_merge(piece, rank, ranks) for rank, piece in enumerate(carried_pieces) if len(piece) > 1]
    merges += pairs.values()
    merged = [(name(parts[0]), name(parts[1])) for parts in merges if len(parts) == 2]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merged, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern or document["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    _starting_with(tokenizer, "<s>")
    return fast(tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@cache
def mistral_tekken() -> PreTrainedTokenizerBase:
    path = str(carried(TEKKEN))
    from transformers import MistralCommonBackend

    return MistralCommonBackend(tokenizer_path=path)


@cache
def mistral_sentencepiece() -> PreTrainedTokenizerBase:
    path = str(carried(SENTENCEPIECE))
    from transformers import MistralCommonBackend

    return MistralCommonBackend(tokenizer_path=path)


@cache
def sentencepiece_bpe(prefix: str = "first") -> PreTrainedTokenizerFast:
    """The carried SentencePiece model as a fast tokenizer.

    Args:
        prefix: `first`, `always` and `never` as Metaspace knows them, or `legacy`: prepended by the normalizer.
    """
    model = sentencepiece.SentencePieceProcessor(model_file=str(carried(SENTENCEPIECE)))
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += [(vocab[piece], vocab[a], vocab[b], a, b) for a, b in splits if a in vocab and b in vocab]
    merges.sort()
    joined = [(a, b) for _, _, _, a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=joined, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fused = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(fused)
    if prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    _starting_with(tokenizer, "<s>")
    return fast(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")


@cache
def slow_sentencepiece() -> BertGenerationTokenizer:
    return BertGenerationTokenizer(
        vocab_file=str(carried(SENTENCEPIECE)), bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


@cache
def _trained_unigram(byte_fallback: bool, rule: str) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n")]),
        model_writer=written,
        vocab_size=700 if byte_fallback else 400,
        model_type="unigram",
        byte_fallback=byte_fallback,
        normalization_rule_name=rule,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@cache
def unigram(*, byte_fallback: bool = True, nfkc: bool = False, unknown: bool = True) -> PreTrainedTokenizerFast:
    """A small Unigram model trained on `CORPUS`; without `unknown` it raises for characters that it lacks."""
    model = _trained_unigram(byte_fallback, "nmt_nfkc" if nfkc else "identity")
    vocab = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0 if unknown else None, byte_fallback=byte_fallback))
    if nfkc:
        tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return fast(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>" if unknown else None)


@cache
def byte_level(
    size: int = 600, *, bos: bool = False, prefix_space: bool = False, form: str | None = None
) -> PreTrainedTokenizerFast:
    """A small byte-level BPE trained on `CORPUS`; `<|endoftext|>` is its bos, eos and pad, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    if form is not None:
        tokenizer.normalizer = getattr(normalizers, form)()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[special], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if bos:
        _starting_with(tokenizer, special)
    return fast(tokenizer, bos_token=special, eos_token=special, pad_token=special)


@cache
def wordpiece(*, lowercase: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    ends = [("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return fast(tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


@cache
def characters() -> PreTrainedTokenizerFast:
    """One token per character of `CORPUS`, `<unk>` for all others."""
    alphabet = sorted({char for text in CORPUS for char in text})
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return fast(tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


@cache
def byte_tokenizer() -> ByT5Tokenizer:
    return ByT5Tokenizer()


@cache
def code_points() -> CanineTokenizer:
    return CanineTokenizer()
