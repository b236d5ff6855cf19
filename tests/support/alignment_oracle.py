"""Which chunks of an alignment are right, computed from the tokenizers alone: spans of the source text and bytes.

Nothing here reads a flag of an alignment or calls the aligner. A cut of the source is one where normalising both parts
gives both parts of the normalised text; tokens lie in the normalised text where a copy of the tokenizer without
normaliser puts them.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tokenizers import normalizers

from tests.support.random_tokenizers import RandomTokenizer
from tests.support.vocabularies import byte_alphabet

_BYTES = byte_alphabet()
_BYTE_STEPS = normalizers.ByteLevel
Point = tuple[int, int]


def _cuts_of_step(step: Any, text: str) -> tuple[str, set[Point]]:
    """What a normaliser makes of a text, and the pairs (source, result) of characters before which both may be cut."""
    result = step.normalize_str(text)
    kind = type(step).__name__
    if kind == "Prepend" and text:
        added = len(result) - len(text)
        return result, {(0, n) for n in range(added + 1)} | {(n, n + added) for n in range(len(text) + 1)}
    if kind == "Strip":
        begin = text.find(result) if result and step.left else 0
        return result, {(n, min(max(n - begin, 0), len(result))) for n in range(len(text) + 1)}
    if kind == "Replace":
        state = json.loads(step.__getstate__())
        pattern = re.escape(state["pattern"]["String"]) if "String" in state["pattern"] else state["pattern"]["Regex"]
        points, at, out = {(0, 0)}, 0, 0
        for found in re.finditer(pattern, text):
            points |= {(n, out + n - at) for n in range(at, found.start() + 1)}
            out += found.start() - at + len(state["content"])
            at = found.end()
            points.add((at, out))
        points |= {(n, out + n - at) for n in range(at, len(text) + 1)}
        assert out + len(text) - at == len(result)
        return result, points
    heads = [step.normalize_str(text[:n]) for n in range(len(text) + 1)]
    tails = [step.normalize_str(text[n:]) for n in range(len(text) + 1)]
    return result, {
        (n, len(head)) for n, (head, tail) in enumerate(zip(heads, tails, strict=True)) if head + tail == result
    }


def source_cuts(steps: Sequence[Any], text: str) -> tuple[str, set[Point]]:
    """The same for several normalisers, one after the other, and for all of them at once."""
    points = {(n, n) for n in range(len(text) + 1)}
    heads, tails = ([reduce(_apply, steps, part) for part in parts] for parts in _halves(text))
    for step in steps:
        text, inner = _cuts_of_step(step, text)
        by_source: dict[int, list[int]] = {}
        for a, b in inner:
            by_source.setdefault(a, []).append(b)
        points = {(a, c) for a, b in points for c in by_source.get(b, [])}
    whole = {(n, len(head)) for n, (head, tail) in enumerate(zip(heads, tails, strict=True)) if head + tail == text}
    return text, points | whole


def _halves(text: str) -> tuple[list[str], list[str]]:
    """All beginnings and all ends of a text."""
    return [text[:n] for n in range(len(text) + 1)], [text[n:] for n in range(len(text) + 1)]


def _apply(text: str, step: Any) -> str:
    return str(step.normalize_str(text))


@dataclass(frozen=True)
class Side:
    """One side of a row, in bytes of the normalised text.

    Attributes:
        begins: Where every token begins; None if it is a special.
        ends: Where it ends.
        spells: The bytes it spells; None if it is unknown.
        covered: Bytes that the model is given: all but what the pre-tokenizer drops.
        normal: The normalised text.
        cuts: Pairs of bytes (source, normalised text) at which both may be cut.
        sign: How tokens write a space.
    """

    begins: list[int | None]
    ends: list[int | None]
    spells: list[bytes | None]
    covered: set[int]
    normal: bytes
    cuts: set[Point]
    sign: str

    def gap(self, at: int) -> tuple[int, int]:
        """The positions at which the row may be cut before its token `at`."""
        # An added space covers nothing. Its offset names the word behind it: it may lie before what is left out there.
        before = [end for n, end in enumerate(self.ends[:at]) if end is not None and not self.is_empty([n])]
        behind = [begin for begin in self.begins[at:] if begin is not None]
        return max(before, default=0), min(behind, default=len(self.normal))

    def is_empty(self, tokens: Sequence[int]) -> bool:
        """Whether tokens cover nothing of the text."""
        return all(self.begins[n] == self.ends[n] for n in tokens)

    def sources(self, at: int, *, closing: bool) -> set[int]:
        """The positions of the source at which the row may be cut before its token `at`, nothing being left out.

        Args:
            at: The token, or the number of tokens.
            closing: What lies between the tokens before and behind the cut belongs to what is behind.
        """
        low, high = self.gap(at)
        high = max(low, high)
        between = [n for n in self.covered if low <= n < high]
        if closing:
            high = min(between, default=high)
        else:
            low = max(between, default=low - 1) + 1
        return {p for p, q in self.cuts if low <= q <= high}

    def may_cover(self, tokens: Sequence[int], p: int, q: int) -> bool:
        """Whether tokens may stand for a span: added spaces for nothing, or for a space that is left out there."""
        if not self.is_empty(tokens):
            return True
        spelled = _blank(b"".join(self.spells[n] or b"" for n in tokens), self.sign)
        images = [self.normal[a:b] for source, a in self.cuts if source == p for end, b in self.cuts if end == q]
        return any(_blank(image, self.sign) in (b"", spelled) for image in images)

    def is_spelled(self, tokens: Sequence[int]) -> bool:
        """Whether neighbouring tokens spell all that the model was given between the first and the last of them."""
        low, high = self.begins[tokens[0]], self.ends[tokens[-1]]
        assert low is not None and high is not None
        missing = {n for n in self.covered if low <= n < high}
        for n in tokens:
            begin, end, spelled = self.begins[n], self.ends[n], self.spells[n]
            if spelled is None or begin is None or end is None:
                return False
            if not _same(spelled, self.normal[begin:end], self.sign):
                return False
            missing -= set(range(begin, end))
        return not missing


def _same(spelled: bytes, text: bytes, sign: str) -> bool:
    """Whether a token spells a stretch of text, but for how it writes spaces and for a space before it."""
    spelled, text = _blank(spelled, sign), _blank(text, sign)
    return spelled in (text, b" " + text)


def _blank(data: bytes, sign: str) -> bytes:
    """The bytes with spaces for what stands for one."""
    return data.replace("\u2581".encode(), b" ").replace(sign.encode(), b" ")


def place(tokenizer: RandomTokenizer, text: str, ids: Sequence[int]) -> Side | None:
    """Where the tokens of a row lie, which may have been cut off at its end; None if that is not known."""
    normal, points = source_cuts(tokenizer.steps, text)
    backend = tokenizer.fast.backend_tokenizer
    expected = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
    assert normal == expected
    encoding = tokenizer.bare.encode(normal, add_special_tokens=False)
    spoken = [i for i, index in enumerate(ids) if index not in (1, 2)]
    if encoding.ids[: len(spoken)] != [ids[i] for i in spoken]:
        return None
    decoded = bool(tokenizer.steps) and isinstance(tokenizer.steps[-1], _BYTE_STEPS)
    if not decoded and any(isinstance(step, _BYTE_STEPS) for step in tokenizer.steps):
        return None
    size = [1 if decoded else len(c.encode()) for c in normal]
    byte_at = [sum(size[:n]) for n in range(len(size) + 1)]
    data = bytes(_BYTES[c] for c in normal) if decoded else normal.encode()
    source_at = [len(text[:n].encode()) for n in range(len(text) + 1)]
    cuts = {(source_at[a], byte_at[b]) for a, b in points}
    for a, b in points:
        c = source_at[a + 1] - source_at[a] if a < len(text) else 0
        unit = text[a : a + 1].encode()
        if c > 1 and (source_at[a + 1], byte_at[b] + c) in cuts and data[byte_at[b] : byte_at[b] + c] == unit:
            cuts |= {(source_at[a] + n, byte_at[b] + n) for n in range(1, c)}
    pre = tokenizer.bare.pre_tokenizer
    words = pre.pre_tokenize_str(normal) if pre is not None else [(normal, (0, len(normal)))]
    if tokenizer.drops and "".join(t.removesuffix(tokenizer.suffix) for t in encoding.tokens) != "".join(
        w for w, _ in words
    ):
        return None
    covered = {
        n
        for word, (a, b) in words
        if _blank(word.encode(), tokenizer.sign).strip(b" ")
        or not _blank(data[byte_at[a] : byte_at[b]], " ").strip(b" ")
        for n in range(byte_at[a], byte_at[b])
    }
    added = _added_spaces(tokenizer, normal, words)
    begins: list[int | None] = [None] * len(ids)
    ends: list[int | None] = [None] * len(ids)
    spells: list[bytes | None] = [None] * len(ids)
    reached = 0
    for n, i in enumerate(spoken):
        token, (a, b) = encoding.tokens[n], encoding.offsets[n]
        spelled = _spelled(tokenizer, token, first=n == 0)
        spells[i] = None if ids[i] == 0 else spelled
        begin, end = byte_at[a], byte_at[b]
        if n in added:
            end = begin  # a space that was put before a word is said to lie where the word begins
            spells[i] = b"" if _FALLBACK.fullmatch(token) else spells[i]
        elif _FALLBACK.fullmatch(token) and data[begin:end] == b" " != spelled:
            # Bytes of the sign for a space: the last of them stands for it.
            last = encoding.offsets[n + 1 : n + 2] != [(a, b)]
            spells[i], end = b" " * last, end if last else begin
        elif _is_partial(token, spelled):
            begin = max(begin, reached)
            # A space that the pre-tokenizer added is part of the token and not of the text.
            end = begin + len(spelled) - (spelled[:1] == b" " != data[begin : begin + 1])
        begins[i], ends[i], reached = begin, end, end
    return Side(begins, ends, spells, covered, data, cuts, tokenizer.sign)


def _added_spaces(tokenizer: RandomTokenizer, normal: str, words: Sequence[tuple[str, Point]]) -> set[int]:
    """Numbers of the tokens that spell nothing but spaces that were put before words."""
    signs = {" ", "\u2581", tokenizer.sign, *(["\u0120"] if tokenizer.encodes_bytes else [])}
    added: set[int] = set()
    count = 0
    for word, (a, b) in words:
        tokens = tokenizer.bare.model.tokenize(word)
        if word != normal[a:b] and word[:1] in signs and normal[a:b][:1] not in signs - {"\u0120"}:
            size = len(word[0].encode())
            added |= {count + n for n, token in enumerate(tokens) if token.offsets[1] <= size}
        count += len(tokens)
    return added


_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def _is_partial(token: str, spelled: bytes) -> bool:
    """Whether a token begins or ends inside a character."""
    if _FALLBACK.fullmatch(token):
        return True
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return True
    return False


def _spelled(tokenizer: RandomTokenizer, token: str, *, first: bool) -> bytes:
    """The bytes of a token's string."""
    if found := _FALLBACK.fullmatch(token):
        return bytes([int(found[1], 16)])
    if tokenizer.suffix:
        token = token.removesuffix(tokenizer.suffix)
    if tokenizer.continues and not first and len(token) > 2:
        token = token.removeprefix(tokenizer.continues)
    if tokenizer.encodes_bytes and all(c in _BYTES for c in token):
        return bytes(_BYTES[c] for c in token)
    return token.encode()


def is_right(sides: tuple[Side, Side], chunk: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Whether both sides of a chunk cover the same span of the source and spell what they make of it."""
    if any(side.begins[n] is None for side, tokens in zip(sides, chunk, strict=True) for n in tokens):
        return False
    opened, closed = (
        set.intersection(
            *(
                side.sources(tokens[0 if first else -1] + (not first), closing=not first)
                for side, tokens in zip(sides, chunk, strict=True)
            )
        )
        for first in (True, False)
    )
    spelled = all(side.is_spelled(tokens) for side, tokens in zip(sides, chunk, strict=True))
    return spelled and any(
        all(side.may_cover(tokens, p, q) for side, tokens in zip(sides, chunk, strict=True))
        for p in opened
        for q in closed
        if p <= q
    )


def sources_of(pair: tuple[RandomTokenizer, RandomTokenizer], text: str) -> list[str]:
    """The text and others that may have become the same tokens: without the text, each may be the source."""
    normal = [source_cuts(tokenizer.steps, text)[0] for tokenizer in pair]
    others = [unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")]
    return list(dict.fromkeys([text, *normal, *others]))
