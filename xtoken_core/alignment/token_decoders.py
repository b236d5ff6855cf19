"""Decoders from token strings to bytes: one function per convention, and the choice between them.

The convention is recognised by what it does, not by class names: every candidate decodes a few encoded probe texts,
and the one that gives the texts back wins. The tokenizer's own description only orders the candidates.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Decode = Callable[[str], bytes]

PROBES = (
    "hello",
    " hello",
    "a b",
    "Hello World, it's antidisestablishmentarianism: qwrtzpsd!",
    "x = 10  # y\n\tz",
    "é",
    "naïve Ärger",
    "日本語",
    "مرحبا",
    "\U0001f600",
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each printable character stands for in byte-level BPE vocabularies (GPT-2's table).

    Bytes that print stand for themselves; the other 68 get the code points from 256 upward, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


_NO_BYTE = "\uffff"
_ALPHABET = str.maketrans(
    {chr(code): _NO_BYTE for code in range(256)} | {char: chr(byte) for char, byte in byte_alphabet().items()}
)


def byte_level(token: str) -> bytes:
    """Decode a byte-level token (GPT-2, Llama 3, Qwen, tekken): one printable character per byte."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def sentencepiece(token: str) -> bytes:
    """Decode a SentencePiece token: `▁` is a space, `<0xNN>` a byte."""
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")


def wordpiece(token: str) -> bytes:
    """Decode a WordPiece token; `##` marks a continuation, spaces between words are lost."""
    return (token[2:] if token.startswith("##") and len(token) > 2 else token).encode("utf-8", "replace")


def end_of_word(token: str) -> bytes:
    """Decode an original-BPE token; `</w>` ends a word, spaces between words are lost."""
    return token.removesuffix("</w>").encode("utf-8", "replace")


def byte_characters(token: str) -> bytes:
    """Decode a byte-tokenizer token (ByT5): character n is byte n."""
    try:
        return token.encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def plain(token: str) -> bytes:
    """Return the token's own text as bytes (character and word tokenizers)."""
    return token.encode("utf-8", "replace")


def spaces_signed(text: str) -> bytes:
    """Decode a pre-token of a SentencePiece-like tokenizer: `▁` is a space."""
    return text.replace("▁", " ").encode("utf-8", "surrogatepass")


def utf8(text: str) -> bytes:
    """Decode a pre-token that is written as it is."""
    return text.encode("utf-8", "surrogatepass")


def content_decoder(decode: Decode | None) -> Decode:
    """Return the decoder of the pre-tokens of a tokenizer whose tokens are decoded by `decode`."""
    if decode is byte_level:
        return byte_level
    return spaces_signed if decode is sentencepiece else utf8


_SCHEMES: tuple[Decode, ...] = (plain, byte_level, sentencepiece, wordpiece, end_of_word, byte_characters)


@dataclass(frozen=True)
class Probe:
    """One text and the tokens it became; `tokens` is None where the tokenizer used its unknown token."""

    text: str
    tokens: Sequence[str] | None


def choose(probes: Sequence[Probe], pipeline: Mapping[str, Any]) -> Decode:
    """Choose the decoder that reconstructs most probe texts.

    Args:
        probes: Texts and their tokens.
        pipeline: Parts of the tokenizer's JSON by name (none if it has none); they break ties.
    """
    ordered = sorted(_SCHEMES, key=lambda scheme: not _hinted(scheme, pipeline))
    known = [probe for probe in probes if probe.tokens is not None]
    return max(ordered, key=lambda scheme: sum(_likeness(scheme, probe) for probe in known))


def _hinted(scheme: Decode, pipeline: Mapping[str, Any]) -> bool:
    model = pipeline.get("model") or {}
    steps = json.dumps([pipeline.get(part) for part in ("pre_tokenizer", "decoder", "normalizer")], ensure_ascii=False)
    hints: dict[Decode, bool] = {
        byte_level: '"ByteLevel"' in steps,
        sentencepiece: '"Metaspace"' in steps or "▁" in steps,
        wordpiece: model.get("type") == "WordPiece",
        end_of_word: bool(model.get("end_of_word_suffix")),
    }
    return hints.get(scheme, False)


def _likeness(scheme: Decode, probe: Probe) -> float:
    assert probe.tokens is not None
    spelled = b"".join(scheme(token) for token in probe.tokens)
    text = probe.text.encode()
    if spelled == text:
        return 1.0
    if spelled == b" " + text:
        return 0.9
    if b"".join(spelled.split()) == b"".join(text.split()):
        return 0.7
    return 0.5 if _folded(spelled) == _folded(text) else 0.0


def _folded(data: bytes) -> str:
    text = unicodedata.normalize("NFKD", data.decode("utf-8", "replace")).casefold()
    return "".join(char for char in text if not char.isspace() and not unicodedata.combining(char))
