"""Normalisation and pre-tokenization of a source text, traced, and the spans of tokens in the result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtoken_core.alignment.normalizer import clusters, compose, flattened, tokenizer_normalizer
from xtoken_core.alignment.tables import SPECIAL, TEXT, TokenTable, added_strings, model_tokens
from xtoken_core.alignment.token_decoders import byte_level, content_decoder

_DROPPING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")
# Characters at the end of a text that are searched for its last cluster, so that the cost does not grow with it.
_LONGEST_CLUSTER = 64
# Specials before a row that may have been set by the tokenizer although the text holds their names.
_LEADING_SPECIALS = 4

_Run = tuple[slice, str | None, str]
"""Tokens, None or the added token that they are, and their text."""


@dataclass(frozen=True)
class NormalizedText:
    """Text that a tokenizer's tokens spell, with its spans in the source.

    Attributes:
        data: The bytes.
        source: `[K]` int64, bytes of the source text at which both may be cut; never falls.
        target: `[K]` int64, the same places in `data`.
        whole: `[M]` int64, those of `target` that are not inside a character.
        last: Where the last character and its marks begin in `data`.
        words: Pre-tokens: the string that the model is given, and where it begins in `data`.
    """

    data: bytes
    source: np.ndarray
    target: np.ndarray
    whole: np.ndarray
    last: int
    words: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class LocatedTokens:
    """Positions of one row's tokens in the normalised source text.

    Attributes:
        data: The normalised text.
        source: As `NormalizedText.source`.
        target: As `NormalizedText.target`, up to where the tokens are known to spell it.
        begins: `[n]` int64: where each token begins in `data`.
        ends: `[n]` int64: where it ends.
        known: `[n]` bool: it spells the bytes between.
    """

    data: bytes
    source: np.ndarray
    target: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    known: np.ndarray


class Pipeline:
    """A tokenizer's normaliser and pre-tokenizer.

    Attributes:
        normalizer: What is done to a text first.
        normalizes: True if that changes more than how spaces are written.
        is_lossless: True if tokens spell the source text itself, but for one space before it.
        edits: True if text is added, removed or replaced beyond single characters and whitespace.
        rewrites: The same, but for added spaces that no token spells.
    """

    def __init__(self, tokenizer: Any, table: TokenTable) -> None:
        self._table = table
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.normalizer = tokenizer_normalizer(tokenizer, self._backend)
        literals = {index: literal.decode("utf-8", "replace") for index, literal in table.literals.items()}
        self._added = added_strings(tokenizer) | literals
        pre_tokenizer = self._backend.pre_tokenizer if self._backend is not None else None
        state = json.loads(pre_tokenizer.__getstate__()) if pre_tokenizer is not None else None
        parts = flattened(state, "pretokenizers")
        drops = table.drops_whitespace or any(part["type"] in _DROPPING for part in parts)
        removes = any(part.get("behavior") == "Removed" or part["type"] == "CharDelimiterSplit" for part in parts)
        self._signs = {part.get("replacement", "▁") for part in parts if part["type"] == "Metaspace"} - {"▁"}
        self.edits = self.normalizer.edits or removes or bool(self._signs)
        rewriting = (step for step in self.normalizer.editing if not (step.inserts and table.drops_whitespace))
        self.rewrites = any(rewriting) or removes or bool(self._signs)
        self.normalizes = self.edits or self.normalizer.characterwise() is not None
        self.is_lossless = not (drops or self.normalizes)

    def is_unchanged(self, text: str) -> bool:
        """Return True if the tokenizer would not edit the text and cannot have written any of it."""
        return self.normalizer.is_unchanged(text) and not any(sign in text for sign in self._signs)

    def locate(self, ids: np.ndarray, text: str, *, cut: bool) -> LocatedTokens | None:
        """Find the tokens of a row in what the tokenizer makes of a source text.

        Args:
            ids: `[n]` int64, without absent tokens.
            text: The source text.
            cut: The text may have been cut off at its end, together with what its last character would have become.

        Returns:
            The tokens' places; None if they do not spell the text.
        """
        # Specials before a row are rather set by the tokenizer than in the text, though the text may hold their names.
        leading = np.append(self._table.kinds[ids[:_LEADING_SPECIALS]] == SPECIAL, False).argmin()
        tried: list[list[_Run]] = []
        # From all of them set by the tokenizer to none, and at last no added token in the text at all.
        for first in (*range(int(leading), -1, -1), len(ids)):
            runs = list(self._runs(ids, text, first))
            # Choices often split the row alike, and placing a run is the expensive part.
            if runs not in tried:
                tried.append(runs)
                placed = self._locate_runs(ids, runs, cut=cut)
                if placed is not None:
                    return placed
        return None

    def _runs(self, ids: np.ndarray, text: str, first: int) -> Iterator[_Run]:
        """Split a row and its text at the added tokens, from token `first` on, whose strings are in the text."""
        begin = at = 0
        for n, index in enumerate(ids[first:].tolist(), first):
            literal = self._added.get(index)
            found = text.find(literal, at) if literal else -1
            if found >= 0:
                assert literal is not None
                yield slice(begin, n), None, text[at:found]
                yield slice(n, n + 1), literal, literal
                begin, at = n + 1, found + len(literal)
        yield slice(begin, len(ids)), None, text[at:]

    def _locate_runs(self, ids: np.ndarray, runs: Sequence[_Run], *, cut: bool) -> LocatedTokens | None:
        begins, ends = np.zeros((2, len(ids)), dtype=np.int64)
        known = np.ones(len(ids), dtype=bool)
        sources, targets, data = [], [], b""
        source_at = 0
        for number, (tokens, literal, text) in enumerate(runs):
            last = number == len(runs) - 1
            size = len(text.encode("utf-8", "surrogatepass"))
            if literal is not None:
                normalized = NormalizedText(
                    text.encode(), np.array([0, size]), np.array([0, size]), np.array([0, size]), 0, ()
                )
                found = np.array([0]), np.array([size]), np.array([True]), size
            else:
                normalized = self.normalized(text)
                located = self._locate_run(ids[tokens], normalized, last=last, cut=cut)
                if located is None:
                    return None
                *_, limit = found = located
                if limit < len(normalized.data) and not last:
                    return None
                if last and cut and self.normalizer.absorbs_following(_last_cluster(text)):
                    # The tokens would be the same if the source did not end here.
                    found = *located[:3], min(limit, normalized.last)
            begins[tokens], ends[tokens], known[tokens] = found[0] + len(data), found[1] + len(data), found[2]
            kept = normalized.target <= found[3]
            sources.append(normalized.source[kept] + source_at)
            targets.append(normalized.target[kept] + len(data))
            data += normalized.data
            source_at += size
        return LocatedTokens(data, np.concatenate(sources), np.concatenate(targets), begins, ends, known)

    def _locate_run(
        self, ids: np.ndarray, normalized: NormalizedText, *, last: bool, cut: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int] | None:
        """Locate tokens between two added ones: begins, ends, which spell the text there, and how far that is known."""
        text = self._table.kinds[ids] == TEXT
        plain = (text | (self._table.kinds[ids] == SPECIAL)).all()
        spelled = self._table.spell(ids)
        if plain:
            prefix = int(normalized.target[normalized.source == 0].max(initial=0))
            # The tokens spell what was put before the text, or a row that continues a text begins without it.
            for own in dict.fromkeys((0, prefix)):
                limit = _agreement(
                    spelled, normalized.data[own:], normalized.last - own if cut else None, whole=not last
                )
                if limit is not None:
                    sizes = np.fromiter((len(self._table.pieces[i]) for i in ids.tolist()), np.int64, len(ids))
                    ends = np.cumsum(sizes) + own
                    limit += own
                    if limit < min(len(normalized.data), len(spelled) + own):
                        # Back to a whole character: a part of one has no image that could be cut.
                        limit = int(normalized.whole[normalized.whole <= limit].max(initial=0))
                    return ends - sizes, ends, np.ones(len(ids), dtype=bool), limit
        return self._locate_by_model(ids, normalized, cut=cut)

    def _locate_by_model(
        self, ids: np.ndarray, normalized: NormalizedText, *, cut: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int] | None:
        """Place tokens by tokenizing the pre-tokens again, for rows with tokens of unknown spelling."""
        if self._backend is None:
            return None
        begins, ends = np.zeros((2, len(ids)), dtype=np.int64)
        known = np.ones(len(ids), dtype=bool)
        spoken = np.flatnonzero(self._table.kinds[ids] != SPECIAL)
        at, limit = 0, 0
        for number, (content, begin) in enumerate(normalized.words, 1):
            tokens = model_tokens(self._backend.model, content)
            if at >= len(spoken):
                break
            if [t.id for t in tokens[: len(spoken) - at]] != ids[spoken[at : at + len(tokens)]].tolist():
                # The last word of a truncated text was tokenized together with what followed there.
                if cut and at and number == len(normalized.words):
                    break
                return None
            widths = [len(content_decoder(self._table.decode)(char)) for char in content]
            bytes_at = np.cumsum([0, *(len(char.encode()) for char in content)])
            # A model that leaves out what it does not know miscounts all that follows in the pre-token.
            whole = bool(tokens) and tokens[-1].offsets[1] == bytes_at[-1]
            data_at = np.cumsum([0, *widths]) + begin
            for token, n in zip(tokens, spoken[at:].tolist(), strict=False):
                offsets = bytes_at.searchsorted(token.offsets)
                b, e = data_at[np.minimum(offsets, len(content))].tolist()
                if not whole:
                    b, e = int(data_at[0]), int(data_at[-1])
                begins[n], ends[n] = b, e
                exact = whole and bytes_at[offsets.clip(max=len(content))].tolist() == list(token.offsets)
                known[n] = (
                    exact
                    and self._table.kinds[ids[n]] == TEXT
                    and self._table.pieces[int(ids[n])] == normalized.data[b:e]
                )
            at += len(tokens)
            limit = int(data_at[-1])
        else:
            limit = len(normalized.data)
            if at < len(spoken) and not cut:
                return None
        for special in np.flatnonzero(self._table.kinds[ids] == SPECIAL).tolist():
            begins[special] = ends[special] = ends[special - 1] if special else 0
        # They end behind every known position, so no cut is found at them.
        rest = spoken[at:]
        begins[rest], ends[rest], known[rest] = limit, limit + 1, False
        return begins, ends, known, limit

    def normalized(self, text: str) -> NormalizedText:
        """Normalise and pre-tokenize a text as the tokenizer does."""
        trace = self.normalizer.trace(text)
        words = self._words(trace.text)
        data, characters, target, begins = self._pre_tokenized(trace.text, words)
        source, target = compose((trace.source, trace.target), (characters, target))
        byte_at = np.cumsum([0, *(len(c.encode("utf-8", "surrogatepass")) for c in text)])
        whole = target
        inner_source, inner_target = _inside_characters(text, byte_at, source, target, data)
        source, target = np.append(byte_at[source], inner_source), np.append(target, inner_target)
        # By source, then by target: places inside characters go where they belong, and neither array falls.
        order = np.lexsort((target, source))
        last = len(text) - len(_last_cluster(text))
        return NormalizedText(
            data,
            source[order],
            target[order],
            whole,
            int(target[order][source[order] <= byte_at[last]].max(initial=0)),
            tuple(zip((word for word, _ in words), begins, strict=True)),
        )

    def _words(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Return the pre-tokens of a normalised text and the characters that each of them is made of."""
        if self._backend is not None and self._backend.pre_tokenizer is not None:
            words: list[tuple[str, tuple[int, int]]] = self._backend.pre_tokenizer.pre_tokenize_str(text)
            return words
        if self._backend is None and self._table.drops_whitespace:
            return [(found[0], found.span()) for found in re.finditer(r"\S+", text)]
        prefix = self._table.prefix if self._backend is None else "none"
        dummy_prefixed = prefix == "always" or (prefix == "missing" and not text.startswith(" "))
        return [(" " * dummy_prefixed + text, (0, len(text)))] if text else []

    def _pre_tokenized(
        self, text: str, words: Sequence[tuple[str, tuple[int, int]]]
    ) -> tuple[bytes, np.ndarray, np.ndarray, list[int]]:
        """Return the bytes of the pre-tokens, pairs of characters of the text and bytes, and where pre-tokens begin."""
        decode = content_decoder(self._table.decode)
        signs = {"▁", *self._signs, *("Ġ" * (decode is byte_level))}
        data: list[bytes] = []
        characters, target, begins = [np.zeros(1, dtype=np.int64)], [np.zeros(1, dtype=np.int64)], []
        at = last = 0
        unclear = np.zeros(len(text) + 1, dtype=bool)
        behind = [*(span[0] for _, span in words[1:]), len(text)][: len(words)]
        for (content, (begin, end)), limit in zip(words, behind, strict=True):
            end = max(begin, min(end, limit))  # what was put before a pre-token is said to lie where that does
            if content in signs and text[begin:end] not in (content, " "):
                end = begin  # the same for what stands alone, though the character was dropped
            dropped = np.arange(last, begin + 1)
            characters.append(dropped)
            target.append(np.full(len(dropped), at))
            begins.append(at)
            spelled = decode(content)
            widths = _widths(content, spelled, text[begin:end], decode)
            unclear[begin : end + 1] |= widths is None
            ends = np.cumsum(widths or [0, len(spelled)]) + at
            # The first width is that of what was put before the pre-token; None of it is in the text.
            steps = len(ends) - 1
            characters.append(begin + (np.arange(steps + 1) if steps == end - begin else np.array([0, end - begin])))
            target.append(ends)
            data.append(spelled)
            at += len(spelled)
            last = end
        rest = np.arange(last, len(text) + 1)
        characters.append(rest)
        target.append(np.full(len(rest), at))
        pairs = np.unique(np.stack([np.concatenate(characters), np.concatenate(target)], axis=1), axis=0)
        # How such a pre-token was written is not known, so nothing inside it may be cut.
        pairs = pairs[~unclear[pairs[:, 0]]]
        return b"".join(data), pairs[:, 0], pairs[:, 1], begins


def _last_cluster(text: str) -> str:
    """Return the last character of a text with all that may compose with it."""
    parts: list[str] = clusters().findall(text[-_LONGEST_CLUSTER:])
    return parts[-1] if parts else ""


def _widths(content: str, spelled: bytes, source: str, decode: Any) -> list[int] | None:
    """Return the bytes that were put before a pre-token, then those of each character; None if that is not clear."""
    widths = [len(char.encode("utf-8", "surrogatepass")) for char in source]
    raw = source.encode("utf-8", "surrogatepass")
    if spelled == raw:
        return [0, *widths]
    if spelled == b" " + raw:
        return [1, *widths]
    added = len(content) - len(source)
    if added in (0, 1) and all(a in (b, " ") for a, b in zip(source, content[added:], strict=True)):
        own = [len(decode(char)) for char in content]
        if sum(own) == len(spelled):
            return own if added else [0, *own]
    return None


def _inside_characters(
    text: str, byte_at: np.ndarray, source: np.ndarray, target: np.ndarray, data: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places inside characters that are spelled as they are, in the source and in the result."""
    width = np.diff(byte_at[source])
    same = np.flatnonzero((np.diff(source) == 1) & (width > 1) & (np.diff(target) == width))
    inner: list[tuple[int, int]] = []
    for at in same.tolist():
        begin, size = int(target[at]), int(width[at])
        if text[int(source[at])].encode("utf-8", "surrogatepass") == data[begin : begin + size]:
            inner += [(int(byte_at[source[at]]) + n, begin + n) for n in range(1, size)]
    array = np.array(inner, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _agreement(spelled: bytes, normalized: bytes, last: int | None, *, whole: bool) -> int | None:
    """Return how far tokens spell a normalised text, None if not far enough.

    Args:
        spelled: What the tokens spell.
        normalized: What they should.
        last: From where this may differ, since the source was cut off; None if it was not.
        whole: The tokens spell all of the text, or none of it.
    """
    size = min(len(spelled), len(normalized))
    if spelled[:size] == normalized[:size]:
        complete = len(spelled) == len(normalized) if whole else last is not None or len(spelled) <= len(normalized)
        return size if complete else None
    if last is None or whole:
        return None
    a, b = np.frombuffer(spelled[:size], dtype=np.uint8), np.frombuffer(normalized[:size], dtype=np.uint8)
    common = int((a != b).argmax())
    return common if common >= last else None
