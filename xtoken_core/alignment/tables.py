"""Table of the tokens of a tokenizer: the bytes of each, or its role if it spells nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from xtoken_core.alignment import token_decoders
from xtoken_core.alignment.normalizer import Normalizer, tokenizer_normalizer
from xtoken_core.errors import InputError

_BOS, _EOS = ("bos_token_id", "cls_token_id"), ("eos_token_id", "sep_token_id")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
TEXT, SPECIAL, UNKNOWN = 0, 1, 2
"""Kinds of tokens: one that spells its bytes, one that spells nothing, one of unknown bytes."""


@dataclass(frozen=True)
class Pool:
    """The spellings of all tokens one after the other, then those of specials written out.

    Attributes:
        data: uint8.
        ends: `[V]` int64: where a token's spelling ends in `data`.
        lengths: `[V]` int64: its length.
        literal_ends: `[V]` int64: the same for tokens written out; for all but specials as `ends`.
        literal_lengths: `[V]` int64.
    """

    data: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray
    literal_ends: np.ndarray
    literal_lengths: np.ndarray


def spelling_pool(pieces: Sequence[bytes], literals: Mapping[int, bytes]) -> Pool:
    """Concatenate the spellings of tokens by id, and of specials by id, in one array."""
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    ends = np.cumsum(lengths)
    literal_ends, literal_lengths = ends.copy(), lengths.copy()
    at = int(ends[-1]) if len(ends) else 0
    for index, literal in literals.items():
        at += len(literal)
        literal_ends[index], literal_lengths[index] = at, len(literal)
    data = np.frombuffer(b"".join([*pieces, *literals.values(), b"\0"]), dtype=np.uint8)
    return Pool(data, ends, lengths, literal_ends, literal_lengths)


def spread(ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions of all intervals `[end - length, end)`, concatenated, int64."""
    positions: np.ndarray = (ends - lengths.cumsum()).repeat(lengths)
    positions += np.arange(len(positions))
    return positions


@dataclass(frozen=True)
class TokenTable:
    """Every token of one tokenizer.

    Attributes:
        pieces: By id, the bytes it spells in running text; empty for specials and the unknown token.
        kinds: `[V]` uint8: `TEXT`, `SPECIAL` or `UNKNOWN`.
        roles: Id of a special -> its role: `bos`, `eos`, `pad`, `bos|eos` or, for all others, its own string.
        literals: Id of a special -> the bytes of its own string.
        prefix: Whether the tokenizer puts a space before a text: `none`, `always`, or only where it is `missing`.
        prefix_after_special: Whether it does so after every special as well.
        drops_whitespace: Spaces between words are not spelled by any token.
        normalizer: What it does to the characters of a text before it tokenizes them; None if nothing.
        decode: How its token strings write bytes; None if they are bytes.
        byte_tokens: Ids of the tokens of byte fallback, `<0x41>`, which the tokenizer writes for characters that its
            vocabulary lacks.
    """

    pieces: tuple[bytes, ...]
    kinds: np.ndarray
    roles: Mapping[int, str]
    literals: Mapping[int, bytes]
    prefix: str = "none"
    prefix_after_special: bool = False
    drops_whitespace: bool = False
    normalizer: Normalizer | None = field(default=None, compare=False)
    decode: token_decoders.Decode | None = field(default=None, compare=False)
    byte_tokens: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.pieces)

    @cached_property
    def pool(self) -> Pool:
        """All spellings in one array."""
        return spelling_pool(self.pieces, self.literals)

    @cached_property
    def unused_bytes(self) -> frozenset[int]:
        """Ids of the tokens of byte fallback that the tokenizer never writes: another token spells the same byte."""
        others = {piece for index, piece in enumerate(self.pieces) if index not in self.byte_tokens}
        return frozenset(index for index in self.byte_tokens if self.pieces[index] in others)

    def shown(self, index: int) -> str:
        """Return a token as text, a special by its name; bytes that are no whole characters in hexadecimal."""
        return self.literals.get(index, self.pieces[index]).decode("utf-8", "backslashreplace")

    def spell(self, ids: Any) -> bytes:
        """Return the bytes that these ids spell, concatenated, including the space that was put before them."""
        return b"".join(map(self.pieces.__getitem__, np.asarray(ids).ravel().tolist()))


def token_table(tokenizer: Any) -> TokenTable:
    """Read the table off a tokenizer: Hugging Face fast or slow, or mistral-common's.

    Raises:
        InputError: The tokenizer has no vocabulary, or its tokens do not spell the texts it is given.
    """
    tokens = _mistral_pieces(tokenizer) or _token_strings(tokenizer)
    size = max(max(tokens, default=-1) + 1, _length(tokenizer))
    specials = _special_strings(tokenizer, tokens)
    unknown = _unknown(tokenizer)
    decode = _scheme(tokenizer, tokens, unknown)
    written = {i: t.encode("utf-8", "replace") for i, t in added_strings(tokenizer).items() if i not in specials}
    pieces = [b""] * size
    marks = _marks(tokenizer)
    for index, token in tokens.items():
        if index not in specials and index != unknown:
            pieces[index] = written.get(index) or (
                token if isinstance(token, bytes) else decode(_unmarked(token, marks))
            )
    kinds = np.zeros(size, dtype=np.uint8)
    kinds[list(specials)] = SPECIAL
    # GPT-2's unknown token is its end-of-text token, and never stands for text.
    if unknown is not None and unknown not in _ids(tokenizer, *_BOS, *_EOS):
        kinds[unknown] = UNKNOWN
    bare = TokenTable(
        pieces=tuple(pieces),
        kinds=kinds,
        roles=_roles(tokenizer, {i: s for i, s in specials.items() if kinds[i] == SPECIAL}),
        literals={i: s.encode("utf-8", "replace") for i, s in specials.items() if kinds[i] == SPECIAL},
        decode=None if any(isinstance(token, bytes) for token in tokens.values()) else decode,
        byte_tokens=frozenset(
            index
            for index, token in tokens.items()
            if isinstance(token, str) and _BYTE.fullmatch(token) and len(pieces[index]) == 1
        ),
    )
    return _with_habits(bare, tokenizer)


def _marks(tokenizer: Any) -> tuple[str, str]:
    """Return the prefix of tokens that continue a word, and the suffix of tokens that end one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = backend.model if backend is not None else None
    return (getattr(model, "continuing_subword_prefix", None) or "", getattr(model, "end_of_word_suffix", None) or "")


def _unmarked(token: str, marks: tuple[str, str]) -> str:
    continues, ends = marks
    return (token.removeprefix(continues) if len(token) > len(continues) else token).removesuffix(ends)


def _unknown(tokenizer: Any) -> int | None:
    """Return the id of the unknown token; the model's own if the tokenizer names none."""
    named = getattr(tokenizer, "unk_token_id", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if named is not None or backend is None:
        return named
    token = getattr(backend.model, "unk_token", None)
    if token is not None:
        index: int | None = backend.token_to_id(token)
        return index
    if type(backend.model).__name__ == "Unigram":
        # A character that is none stands for itself in no vocabulary: one token for it is the unknown token.
        (*_, last) = model_tokens(backend.model, "\U0010ffff") or [None]
        return int(last.id) if last is not None and not _BYTE.fullmatch(backend.id_to_token(last.id) or "") else None
    return None


def _or_none(encode: Callable[[Any], Any], text: Any) -> Any:
    """Call an encoder; None if it has no unknown token and its vocabulary lacks a character of the text."""
    try:
        return encode(text)
    except Exception as error:
        if type(error) is not Exception:  # the package `tokenizers` raises nothing more specific
            raise
        return None


def model_tokens(model: Any, content: str) -> list[Any]:
    """Return the tokens of a pre-token by a `tokenizers` model; none if it cannot write it."""
    try:
        return list(model.tokenize(content))
    except Exception:  # the package raises bare exceptions, such as for a word outside a vocabulary without unknown
        return []


def encode_plain(tokenizer: Any, text: str) -> list[int] | None:
    """Tokenize a text without the special tokens that a tokenizer adds around it.

    Returns:
        The ids; None if the tokenizer has no unknown token, and no token for a character of the text.
    """
    ids = _or_none(lambda each: tokenizer.encode(each, add_special_tokens=False), text)
    return ids if ids is None else [int(i) for i in ids]


def encode_each(backend: Any, texts: Sequence[str], *, specials: bool) -> list[list[int] | None]:
    """Tokenize texts by a `tokenizers` tokenizer: ids of each, None as of `encode_plain`.

    Args:
        backend: The tokenizer.
        texts: The texts.
        specials: Add the tokenizer's default special tokens.
    """
    encodings = _or_none(lambda batch: backend.encode_batch_fast(batch, add_special_tokens=specials), list(texts))
    if encodings is not None:
        return [encoding.ids for encoding in encodings]
    if len(texts) == 1:
        return [None]
    # One text that cannot be written fails a whole batch without saying which: halving finds it.
    half = len(texts) // 2
    return [ids for part in (texts[:half], texts[half:]) for ids in encode_each(backend, part, specials=specials)]


def _scheme(tokenizer: Any, tokens: Mapping[int, str | bytes], unknown: int | None) -> token_decoders.Decode:
    marks = _marks(tokenizer)
    probes = []
    for text in token_decoders.PROBES:
        ids = encode_plain(tokenizer, text)
        strings = [tokens.get(i, "") for i in ids or () if i != unknown]
        known = ids is not None and len(strings) == len(ids) and all(isinstance(s, str) for s in strings)
        probes.append(token_decoders.Probe(text, [_unmarked(str(s), marks) for s in strings] if known else None))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return token_decoders.choose(probes, _pipeline(backend) if backend is not None else {})


def _pipeline(backend: Any) -> dict[str, Any]:
    """Return the backend's parts as in its JSON, without its vocabulary."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    described = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    # Two names instead of the model's JSON, which holds the vocabulary: megabytes of it.
    model = {"type": type(backend.model).__name__}
    if suffix := getattr(backend.model, "end_of_word_suffix", None):
        model["end_of_word_suffix"] = suffix
    return described | {"model": model}


def _token_strings(tokenizer: Any) -> dict[int, str | bytes]:
    if hasattr(tokenizer, "get_vocab"):
        return {index: token for token, index in tokenizer.get_vocab().items()}
    size = _length(tokenizer)
    if not size or not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError(f"{type(tokenizer).__name__} has no vocabulary: get_vocab() is missing")
    return dict(enumerate(tokenizer.convert_ids_to_tokens(list(range(size)))))


def _mistral_pieces(tokenizer: Any) -> dict[int, str | bytes] | None:
    """Return the vocabulary of a tokenizer that wraps mistral-common, which knows its tokens' bytes itself."""
    inner = _mistral_tokenizer(tokenizer)
    if inner is None:
        return None
    if tekkenizer(tokenizer) is None:
        return {index: inner.id_to_piece(index) for index in range(inner.n_words)}
    offset = inner.num_special_tokens
    pieces: dict[int, str | bytes] = {i + offset: p for p, i in inner._tekken_token2id_nospecial.items()}
    return pieces | {index: inner.id_to_piece(index) for index in range(offset)}


def tekkenizer(tokenizer: Any) -> Any:
    """Return mistral-common's byte-level tokenizer inside a wrapper; None for any other tokenizer."""
    inner = _mistral_tokenizer(tokenizer)
    return inner if hasattr(inner, "_tekken_token2id_nospecial") else None


def _mistral_tokenizer(tokenizer: Any) -> Any:
    return getattr(getattr(getattr(tokenizer, "tokenizer", None), "instruct_tokenizer", None), "tokenizer", None)


def _length(tokenizer: Any) -> int:
    return len(tokenizer) if hasattr(tokenizer, "__len__") else int(getattr(tokenizer, "vocab_size", 0))


def _added(tokenizer: Any) -> Mapping[int, Any]:
    added = getattr(tokenizer, "added_tokens_decoder", None)
    return added if isinstance(added, Mapping) else {}


def added_strings(tokenizer: Any) -> dict[int, str]:
    """Return the strings of the tokens that were added to a vocabulary, specials among them, by id."""
    return {int(i): str(t) for i, t in _added(tokenizer).items()}


def _special_strings(tokenizer: Any, tokens: Mapping[int, str | bytes]) -> dict[int, str]:
    ids = {int(i) for i in getattr(tokenizer, "all_special_ids", None) or ()} | set(
        _ids(tokenizer, *_BOS, *_EOS, "pad_token_id")
    )
    ids |= {int(i) for i, token in _added(tokenizer).items() if getattr(token, "special", False)}
    model = getattr(tokenizer, "sp_model", None)
    if model is not None:
        ids |= {i for i in range(model.get_piece_size()) if model.IsControl(i) and i in tokens}
    names = {i: tokens.get(i, b"") for i in ids}
    return {i: t.decode("utf-8", "replace") if isinstance(t, bytes) else t for i, t in names.items()}


def _ids(tokenizer: Any, *names: str) -> list[int]:
    ids = (getattr(tokenizer, name, None) for name in names)
    return [int(i) for i in ids if i is not None]


def _roles(tokenizer: Any, specials: Mapping[int, str]) -> dict[int, str]:
    bos, eos, pad = (next(iter(_ids(tokenizer, *names)), None) for names in (_BOS, _EOS, ("pad_token_id",)))
    # In this order: a token that is padding and EOS is EOS, one that is BOS and EOS says both.
    roles = dict(specials)
    if pad in roles:
        roles[pad] = "pad"
    if bos in roles:
        roles[bos] = "bos"
    if eos in roles:
        roles[eos] = "bos|eos" if bos == eos else "eos"
    return roles


def _with_habits(table: TokenTable, tokenizer: Any) -> TokenTable:
    """Detect how the tokenizer changes a text, from a few probe texts, and add it to the table."""

    def spelled(text: str) -> bytes | None:
        ids = encode_plain(tokenizer, text)
        return None if ids is None or any(table.kinds[i] == UNKNOWN for i in ids) else table.spell(ids)

    word, spaced, two = spelled("hello"), spelled(" hello"), spelled("hello you")
    if all(s is None for s in map(spelled, token_decoders.PROBES)):
        word = spaced = two = None
    prefix = "none"
    if word == b" hello":
        prefix = "always" if spaced == b"  hello" else "missing"
    drops = two is not None and two == b"helloyou"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    after = False
    if prefix != "none" and table.literals:
        literal = next(iter(table.literals.values())).decode("utf-8", "replace")
        after = (spelled(f"hello{literal}you") or b"").endswith(b"hello you")
    normalizer = tokenizer_normalizer(tokenizer, backend).characterwise()
    return replace(table, prefix=prefix, prefix_after_special=after, drops_whitespace=drops, normalizer=normalizer)
