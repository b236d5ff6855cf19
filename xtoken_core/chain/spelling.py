"""Spellings: the text of every token of one tokenizer, as the other writes it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtoken_core.alignment import tables
from xtoken_core.alignment.tables import TEXT, TokenTable
from xtoken_core.alignment.token_arrays import is_text
from xtoken_core.projection.retokenize import Retokenizer

SPELLED, NO_TEXT, UNKNOWN, NOT_WRITTEN, OTHER_TEXT = range(5)
"""Why a token has a spelling or none: it has one; it stands for no text (a special); it stands for text that it does
not name; the other tokenizer has no tokens for its bytes; the other tokenizer changes them."""
REASONS = (
    "its spelling leads to no common token",
    "it stands for no text",
    "it does not name the text that it stands for",
    "the other tokenizer has no tokens for its bytes",
    "the other tokenizer changes its bytes",
)
"""By status, why a token has no root."""


@dataclass(frozen=True)
class Spellings:
    """The other tokenizer's pieces of every token, one token after the other.

    Attributes:
        start: `[V + 1]` int64, where a token's pieces begin.
        piece: `[n]` int64, ids of the other tokenizer.
        status: `[V]` uint8, `SPELLED` or the reason why a token has no pieces.
    """

    start: np.ndarray
    piece: np.ndarray
    status: np.ndarray

    @property
    def count(self) -> np.ndarray:
        """Return each token's number of pieces, `[V]` int64."""
        return np.diff(self.start)

    @property
    def first(self) -> np.ndarray:
        """Return each token's first piece, `[V]` int64; -1 without pieces."""
        padded = np.append(self.piece, -1)
        return np.where(self.count > 0, padded[self.start[:-1]], -1)


def spellings(
    source: TokenTable,
    texts: Sequence[bytes],
    source_compared: Sequence[bytes],
    target: Retokenizer,
    target_compared: Sequence[bytes],
) -> Spellings:
    """Tokenize the bytes of every source token with the target's own tokenizer, as they stand inside a text.

    Bytes are spelled, not text: a token that is a part of a character is spelled by the target's tokens for such parts.

    Args:
        source: The tokens to spell.
        texts: By id, the bytes to tokenize.
        source_compared: By id, the source tokens' bytes after both tokenizers' normalisation.
        target: The tokenizer that spells.
        target_compared: By id, the target tokens' bytes after the same normalisation.
    """
    V = len(source)
    kinds = np.asarray(source.kinds)
    status = np.where(kinds == tables.UNKNOWN, UNKNOWN, NO_TEXT).astype(np.uint8)
    ids = np.flatnonzero((kinds == TEXT) & np.fromiter(map(bool, texts), dtype=bool, count=V))
    pieces, counts = _tokenized([texts[i] for i in ids.tolist()], target)
    status[ids] = np.where(counts > 0, SPELLED, NOT_WRITTEN)
    ends = np.cumsum(counts).tolist()
    flat = pieces.tolist()
    for n, (index, begin, end) in enumerate(zip(ids.tolist(), [0, *ends], ends, strict=False)):
        # A tokenizer that normalises returns pieces of another text: such a token must not be compared as this one.
        if begin < end and b"".join([target_compared[j] for j in flat[begin:end]]) != source_compared[index]:
            status[index], counts[n] = OTHER_TEXT, -counts[n]
    # Negative counts mark tokens whose pieces are dropped, without losing how many these are.
    kept = np.repeat(counts > 0, np.abs(counts))
    every = np.zeros(V, dtype=np.int64)
    every[ids] = np.maximum(counts, 0)
    return Spellings(np.concatenate([[0], np.cumsum(every)]), pieces[kept], status)


def _tokenized(texts: Sequence[bytes], target: Retokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize texts; one with parts of characters is cut into those bytes and the text between them if need be.

    A byte-level tokenizer writes such bytes by its own merges, as it does where the rest of the character follows. One
    that writes bytes one by one writes the whole characters beside them as text.

    Returns:
        int64 ids of all pieces, and `[n]` int64 how many each text became.
    """
    pieces, counts = target(texts)
    broken = [n for n, text in enumerate(texts) if not is_text(text)]
    parts = {n: _parts(texts[n]) for n in broken}
    # One piece per byte, or none: only then may whole characters beside the broken one have been lost as text.
    by_byte = [n for n in broken if counts[n] in (0, len(texts[n]))]
    mixed = [n for n in by_byte if any(len(part) > 1 and is_text(part) for part in parts[n])]
    ends = np.cumsum(counts)
    redone: dict[int, list[int]] = {}
    if mixed:
        flat = list(itertools.chain.from_iterable(parts[n] for n in mixed))
        ids, sizes = target(flat)
        at, cursor = np.concatenate([[0], np.cumsum(sizes)]).tolist(), 0
        for n in mixed:
            spans = [(at[cursor + i], at[cursor + i + 1]) for i in range(len(parts[n]))]
            cursor += len(parts[n])
            better = [int(i) for begin, end in spans for i in ids[begin:end]]
            # Every part must have pieces: a spelling with a gap would stand for fewer bytes than the token.
            if all(begin < end for begin, end in spans):
                redone[n] = better
    if not redone:
        return pieces, counts
    rows = [
        redone.get(n, pieces[end - count : end].tolist())
        for n, (end, count) in enumerate(zip(ends, counts, strict=True))
    ]
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=int(counts.sum())), counts


def _parts(data: bytes) -> list[bytes]:
    r"""Cut into runs of whole characters and single bytes that are part of none.

    >>> _parts(b"ab\xe6\x97")
    [b'ab', b'\xe6', b'\x97']
    """
    text = data.decode("utf-8", "surrogateescape")
    groups = itertools.groupby(text, key=lambda char: "\ud800" <= char <= "\udfff")
    runs: list[str] = []
    for is_byte, chars in groups:
        runs += chars if is_byte else ["".join(chars)]
    return [run.encode("utf-8", "surrogateescape") for run in runs]


def word_start_texts(tokenizer: Any, table: TokenTable) -> list[bytes]:
    """Return by id the bytes a token stands for in a text.

    A vocabulary that spells no spaces (WordPiece) has its words after a space, unless they are marked as continued.
    """
    if not table.drops_whitespace or not hasattr(tokenizer, "get_vocab"):
        return list(table.pieces)
    texts = list(table.pieces)
    for token, index in tokenizer.get_vocab().items():
        if texts[index][:1].isalnum() and not token.startswith("##"):
            texts[index] = b" " + texts[index]
    return texts
