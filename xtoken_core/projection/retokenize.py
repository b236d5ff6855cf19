"""Re-tokenization of one tokenizer's tokens by another, from their bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from xtoken_core.alignment.tables import TEXT, TokenTable, encode_each, encode_plain, model_tokens, tekkenizer
from xtoken_core.alignment.token_decoders import byte_alphabet, byte_level

_SENTINELS = ("\n", ":", "x", "。")


class Retokenizer:
    """Tokenizer of the bytes of single tokens as inside a text: no specials, no space put before them.

    Bytes that are not whole characters are tokenized too: by the merges themselves where the vocabulary is byte-level,
    else byte by byte.

    Attributes:
        backend: A copy of the `tokenizers` tokenizer that puts no space before a text; None for a slow tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer.
        table: What its tokens spell.
    """

    def __init__(self, tokenizer: Any, table: TokenTable) -> None:
        self.table = table
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.backend: Any = _inside_text(backend) if backend is not None else None
        self._tekken = tekkenizer(tokenizer)
        self._bytes = {piece: index for index, piece in enumerate(table.pieces) if len(piece) == 1}
        self._printable = {byte: char for char, byte in byte_alphabet().items()}

    def __call__(self, spellings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize every spelling.

        Returns:
            `ids`: int64, all pieces one after the other; `counts`: `[n]` int64, how many each spelling became. A
            spelling that the tokenizer cannot write, or not without its unknown token, has none.
        """
        pieces: list[list[int]] = [[]] * len(spellings)
        whole: list[int] = []
        texts: list[str] = []
        for index, spelling in enumerate(spellings):
            try:
                texts.append(spelling.decode())
                whole.append(index)
            except UnicodeDecodeError:
                pieces[index] = self._broken(spelling)
        for index, ids in zip(whole, self._texts(texts), strict=True):
            pieces[index] = ids
        counts = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        flat = np.fromiter((i for row in pieces for i in row), dtype=np.int64, count=int(counts.sum()))
        unknown = np.bincount(
            np.repeat(np.arange(len(pieces)), counts)[self.table.kinds[flat] != TEXT], minlength=len(counts)
        )
        if unknown.any():
            kept = unknown == 0
            flat = flat[np.repeat(kept, counts)]
            counts = np.where(kept, counts, 0)
        return flat, counts

    def _texts(self, texts: Sequence[str]) -> list[list[int]]:
        if self.backend is None:
            return [self._continued(text) for text in texts]
        return [ids or [] for ids in encode_each(self.backend, texts, specials=False)]

    def _continued(self, text: str) -> list[int]:
        """Tokenize one text by a slow tokenizer, after another text where it would put a space before it."""
        if self.table.prefix == "none":
            return encode_plain(self._tokenizer, text) or []
        for sentinel in _SENTINELS:
            alone, both = encode_plain(self._tokenizer, sentinel), encode_plain(self._tokenizer, sentinel + text)
            if alone is not None and both is not None and both[: len(alone)] == alone:
                return both[len(alone) :]
        return encode_plain(self._tokenizer, text) or []

    def _broken(self, spelling: bytes) -> list[int]:
        if self._tekken is not None:
            offset = self._tekken.num_special_tokens
            return [int(i) + offset for i in self._tekken._model._encode_single_piece(spelling)]
        if self.backend is not None:
            shown = "".join(self._printable[byte] for byte in spelling)
            ids = [token.id for token in model_tokens(self.backend.model, shown)]
            if ids and byte_level(shown) == spelling == self.table.spell(ids):
                return ids
        byte_ids = [self._bytes.get(spelling[i : i + 1]) for i in range(len(spelling))]
        return [] if any(i is None for i in byte_ids) else [int(i) for i in byte_ids if i is not None]


def _inside_text(backend: Any) -> Any:
    """Return a copy that puts no space before a text and takes specials' names for text."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["truncation"] = state["padding"] = None
    state["normalizer"] = _without_prepend(state.get("normalizer"))
    _never_prefix(state.get("pre_tokenizer"))
    copy = Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy


def _without_prepend(normalizer: Any) -> Any:
    if not normalizer or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        parts = [_without_prepend(part) for part in normalizer["normalizers"]]
        return normalizer | {"normalizers": [part for part in parts if part is not None]}
    return normalizer


def _never_prefix(pre_tokenizer: Any) -> None:
    if not pre_tokenizer:
        return
    if pre_tokenizer["type"] == "Metaspace":
        pre_tokenizer["prepend_scheme"] = "never"
    if "add_prefix_space" in pre_tokenizer:
        pre_tokenizer["add_prefix_space"] = False
    for part in pre_tokenizer.get("pretokenizers", ()):
        _never_prefix(part)
