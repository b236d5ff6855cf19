"""Normalisation with a trace: a tokenizer's normal form of a text, and the offsets at which both may be cut."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

_CHARACTERWISE = {
    "NFC": "NFC",
    "NFD": "NFD",
    "NFKC": "NFKC",
    "NFKD": "NFKD",
    "Lowercase": "lower-cases",
    "StripAccents": "strips accents",
    "BertNormalizer": "cleans text as BERT does",
    "Precompiled": "maps characters as SentencePiece does",
    "Nmt": "cleans text as SentencePiece does",
}
_KEEPS_ASCII_APART = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt")
"""Steps that map every ASCII character to one character or none."""
_KEEPS_SPACES_APART = ("NFC", "NFD", "Lowercase", "StripAccents", "ByteLevel")
"""Steps that make no space of another character."""
_FOLLOWING = ("\u0323", "\n")
"""Characters that join the one before them in a cluster: a mark, and the line feed behind a carriage return."""
_SPACE_SIGNS = ("▁", " ")
# Cuts nearest to the middle that `_bisect` tries: each costs two more normalisations.
_SPLIT_ATTEMPTS = 8


@dataclass(frozen=True)
class Trace:
    """A text's image under a mapping, and the pairs of positions at which both may be cut.

    A cut before character `source[k]` of the text is one before unit `target[k]` of its image: the image of what is
    before it and that of what is behind it are the two parts of the whole image. Both arrays never fall and both ends
    are among the pairs; a deleted character has two sources for one target, an inserted one two targets for one source.

    Attributes:
        text: The image.
        source: `[K]` int64.
        target: `[K]` int64.
    """

    text: str
    source: np.ndarray
    target: np.ndarray

    def then(self, other: Trace) -> Trace:
        """Return the trace of this mapping followed by another one, that of `self.text`."""
        source, target = compose((self.source, self.target), (other.source, other.target))
        return Trace(other.text, source, target)


def compose(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Join two lists of position pairs, `[K]` int64 each, on the positions in the middle."""
    source, middle = first
    begin = second[0].searchsorted(middle, side="left")
    counts = second[0].searchsorted(middle, side="right") - begin
    # Of several sources of one middle position only the last takes all its targets: the pairs must not cross.
    last = np.append(middle[1:] != middle[:-1], True)
    counts = np.where(last, counts, np.minimum(counts, 1))
    at = np.repeat(begin + counts - np.cumsum(counts), counts) + np.arange(int(counts.sum()))
    return np.repeat(source, counts), second[1][at]


@dataclass(frozen=True)
class Step:
    """One normalizer of the `tokenizers` package that is not a sequence of others.

    Attributes:
        kind: Its type, as its JSON names it.
        state: Its JSON.
        apply: The mapping of texts.
    """

    kind: str
    state: str
    apply: Callable[[str], str] = field(compare=False)

    @cached_property
    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = json.loads(self.state)
        return options

    @property
    def is_characterwise(self) -> bool:
        """Return True if it maps characters or clusters of them one by one."""
        return self.kind in _CHARACTERWISE

    @property
    def writes_spaces(self) -> bool:
        """Return True if all it does is to write spaces with a sign or to add one: token tables know about that."""
        options = self._options
        if self.kind == "Prepend":
            return options["prepend"] in _SPACE_SIGNS
        return self.kind == "Replace" and options["pattern"] == {"String": " "} and options["content"] in _SPACE_SIGNS

    @property
    def inserts(self) -> bool:
        """Return True if it puts spaces around characters."""
        return bool(self._options.get("handle_chinese_chars"))

    @property
    def edits(self) -> bool:
        """Return True if it adds, removes or replaces text other than spaces and single characters."""
        return self.inserts or not (self.is_characterwise or self.writes_spaces)

    def trace(self, text: str) -> Trace:
        """Apply the step and find where its input and output may be cut alike."""
        image = self.apply(text)
        if self.kind == "Prepend" and image.endswith(text):
            return _prepended(text, image)
        if self.kind == "Strip":
            # Only whitespace lies before what is left, and that does not begin with any: the first match is the place.
            begin = text.find(image) if image and self._options["strip_left"] else 0
            return _selected(text, image, begin)
        if image == text:
            return _identity(text)
        if self.kind == "Replace":
            parts, images = _replaced(text, self._options["pattern"], self._options["content"])
            if "".join(images) == image:
                return _of_parts(parts, images)
            return _of_parts([text], [image])
        # Bytes are written character by character. Of a cluster that another step changes no part has a source known.
        parts = list(text) if self.kind == "ByteLevel" else clusters().findall(text)
        images = list(map(cache(self.apply), parts))  # most texts repeat their clusters
        if "".join(images) != image:
            # The step looks beyond a cluster: cut where the images of both halves still join to the whole.
            parts, images = self._bisect(clusters().findall(text))
        return _of_parts(parts, images)

    def _bisect(self, parts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split where the images of both halves make up that of the whole; what cannot be split is one part."""
        text = "".join(parts)
        image = self.apply(text)
        middle = len(parts) // 2
        near = sorted(range(1, len(parts)), key=lambda at: abs(at - middle))[:_SPLIT_ATTEMPTS]
        for at in near:
            if self.apply("".join(parts[:at])) + self.apply("".join(parts[at:])) == image:
                left, right = self._bisect(parts[:at]), self._bisect(parts[at:])
                return left[0] + right[0], left[1] + right[1]
        return [text], [image]


@dataclass(frozen=True)
class Normalizer:
    """The steps that a tokenizer applies to a text, in order."""

    steps: tuple[Step, ...]

    @property
    def description(self) -> str:
        """Return what the steps do, for a message."""
        return ", ".join(dict.fromkeys(_CHARACTERWISE.get(step.kind, step.kind) for step in self.steps))

    def __call__(self, text: str) -> str:
        """Return the normalised text."""
        for step in self.steps:
            text = step.apply(text)
        return text

    def trace(self, text: str) -> Trace:
        """Normalise a text and find where it and the result may be cut alike."""
        trace = _identity(text)
        for step in self.steps:
            trace = trace.then(step.trace(trace.text))
        return trace

    def then(self, other: Normalizer | None) -> Normalizer:
        """Return the normalizer that applies this one, then the other."""
        return self if other is None or other == self else Normalizer(self.steps + other.steps)

    def merges(self, text: str) -> bool:
        """Return True if the result may have characters that are not those of the text one by one."""
        steps = [step for step in self.steps if not (step.writes_spaces or step.kind == "ByteLevel")]
        if text.isascii() and all(step.kind in _KEEPS_ASCII_APART for step in steps):
            return False
        return any(step.apply(text) != text for step in steps)

    def is_unchanged(self, text: str) -> bool:
        """Return True if normalisation changes only whitespace and single characters of a text."""
        return all(step.apply(text) == text for step in self.editing)

    @property
    def makes_spaces(self) -> bool:
        """Return True if characters that are no spaces may become some."""
        return any(step.kind not in _KEEPS_SPACES_APART and not step.writes_spaces for step in self.steps)

    def absorbs_following(self, cluster: str) -> bool:
        """Return True if some character is normalised to nothing after this cluster but not on its own."""
        image = self(cluster)
        return any(self(char) and self(cluster + char) == image for char in _FOLLOWING)

    def characterwise(self) -> Normalizer | None:
        """Return the steps that map characters; None if there is none."""
        steps = tuple(step for step in self.steps if step.is_characterwise)
        return Normalizer(steps) if steps else None

    @property
    def edits(self) -> bool:
        """Return True if a step adds, removes or replaces text other than spaces and single characters."""
        return bool(self.editing)

    @property
    def editing(self) -> list[Step]:
        """Return the steps that do so; not that which writes bytes as characters at the end."""
        encoded = bool(self.steps) and self.steps[-1].kind == "ByteLevel"
        return [step for step in (self.steps[:-1] if encoded else self.steps) if step.edits]


def tokenizer_normalizer(tokenizer: Any, backend: Any) -> Normalizer:
    """Read off everything that a tokenizer does to a text before it splits it.

    A slow tokenizer that wraps a SentencePiece model with a character map is asked for that map.
    """
    if backend is not None:
        state = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else None
        return Normalizer(tuple(_step(part) for part in flattened(state, "normalizers")))
    if getattr(tokenizer, "do_lower_case", False):
        return Normalizer((_step({"type": "Lowercase"}),))
    model = getattr(tokenizer, "sp_model", None)
    # A SentencePiece model with a character map amounts to NFKC if it changes a ligature.
    if model is not None and "fi" in model.normalize("ﬁ"):
        return Normalizer((_step({"type": "NFKC"}),))
    return Normalizer(())


def flattened(state: Any, members: str) -> list[dict[str, Any]]:
    """Return the parts of a component's JSON, the members of nested sequences in order."""
    if not state:
        return []
    if state["type"] == "Sequence":
        return [part for inner in state[members] for part in flattened(inner, members)]
    return [state]


def _step(state: dict[str, Any]) -> Step:
    from tokenizers import Tokenizer

    bare = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}, "normalizer": state}
    normalizer: Any = Tokenizer.from_str(json.dumps(bare)).normalizer
    return Step(state["type"], json.dumps(state, sort_keys=True), normalizer.normalize_str)


def _identity(text: str) -> Trace:
    at = np.arange(len(text) + 1)
    return Trace(text, at, at)


def _prepended(text: str, image: str) -> Trace:
    added = len(image) - len(text)
    at = np.arange(len(text) + 1)
    return Trace(image, np.r_[np.zeros(added, dtype=np.int64), at], np.r_[np.arange(added), at + added])


def _selected(text: str, image: str, begin: int) -> Trace:
    """Return the trace to a stretch of the text itself; characters before and behind it are deleted one by one."""
    at = np.arange(len(text) + 1)
    return Trace(image, at, np.clip(at - begin, 0, len(image)))


def _of_parts(parts: Sequence[str], images: Sequence[str]) -> Trace:
    """Return the trace of texts that are mapped one by one; one that does not change may be cut anywhere."""
    sizes: list[int] = []
    image_sizes: list[int] = []
    for part, image in zip(parts, images, strict=True):
        if part == image:
            sizes += [1] * len(part)
            image_sizes += [1] * len(part)
        else:
            sizes.append(len(part))
            image_sizes.append(len(image))
    ends = (np.cumsum(np.array([0, *values], dtype=np.int64)) for values in (sizes, image_sizes))
    return Trace("".join(images), *ends)


def _replaced(text: str, pattern: dict[str, str], content: str) -> tuple[list[str], list[str]]:
    """Split a text into matches and the parts between them; return them and the replacement of each."""
    from tokenizers import Regex, pre_tokenizers

    if "String" in pattern:
        between = text.split(pattern["String"]) if pattern["String"] else [text]
        parts = [part for piece in between for part in (piece, pattern["String"])][:-1]
        return parts, [part if n % 2 == 0 else content for n, part in enumerate(parts)]
    expression = Regex(pattern["Regex"])
    kept = {span for _, span in pre_tokenizers.Split(expression, "removed").pre_tokenize_str(text)}
    every = pre_tokenizers.Split(expression, "isolated").pre_tokenize_str(text)
    parts = [text[begin:end] for _, (begin, end) in every]
    return parts, [text[b:e] if (b, e) in kept else content for _, (b, e) in every]


@cache
def clusters() -> re.Pattern[str]:
    """Compile the pattern of a character with all that may compose with it, change order with it or join it."""
    # Joiners, Hangul vowels and finals, skin tones, variation selectors: they join what precedes, and are no marks.
    joining = {0x200C, 0x200D, *range(0x1160, 0x1200), *range(0x1F3FB, 0x1F400), *range(0xE0100, 0xE01F0)}
    for code in range(0xA0, 0x20000):
        char = chr(code)
        if unicodedata.combining(char) or unicodedata.category(char)[0] == "M":
            joining.add(code)
        # The second half of a canonical decomposition composes with what precedes it, under NFC.
        parts = unicodedata.decomposition(char).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            joining.add(int(parts[1], 16))
    codes = np.array(sorted(joining))
    runs = np.split(codes, np.flatnonzero(np.diff(codes) > 1) + 1)
    marks = "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)
    return re.compile(rf"\r\n|[\s\S][{marks}]*")
