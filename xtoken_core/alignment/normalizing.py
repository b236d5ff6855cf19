"""What a tokenizer does to characters before it tokenizes them, and where each byte of the result comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Normalizer:
    """A tokenizer's character mapping.

    Attributes:
        steps: Normalizers of the `tokenizers` package, applied in order.
        description: What they do, for a message.
    """

    steps: tuple[Any, ...]
    description: str

    def __call__(self, text: str) -> str:
        """The normalised text."""
        for step in self.steps:
            text = step.normalize_str(text)
        return text

    def traced(self, text: str) -> tuple[str, np.ndarray]:
        """The normalised text and, for each of its characters, the byte of `text` it begins at: int64."""
        from tokenizers import PreTokenizedString, Regex

        traced = PreTokenizedString(text)
        for step in self.steps:
            traced.normalize(step.normalize)
        every = Regex(r"[\s\S]")
        traced.split(lambda _, part: part.split(every, "isolated"))
        splits = traced.get_splits("original", "byte")
        starts = np.fromiter((span[0] for _, span, _ in splits), dtype=np.int64, count=len(splits))
        return "".join(part for part, _, _ in splits), starts

    def then(self, other: Normalizer | None) -> Normalizer:
        """This one, then the other."""
        if other is None or other is self:
            return self
        return Normalizer(self.steps + other.steps, f"{self.description}, {other.description}")


def character_normalizer(tokenizer: Any, backend: Any) -> Normalizer | None:
    """The part of a fast tokenizer's normalizer that changes characters; None if there is none.

    Spaces that are put before a text, doubled or replaced by a sign are the token table's business.
    A slow tokenizer that wraps a SentencePiece model with a character map is asked for that map.
    """
    if backend is not None:
        state = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else None
        states = [s for s in _flattened(state) if s["type"] in _CHARACTERWISE]
        names = dict.fromkeys(_CHARACTERWISE[s["type"]] for s in states)
        return Normalizer(tuple(map(_from_state, states)), ", ".join(names)) if states else None
    lower = bool(getattr(tokenizer, "do_lower_case", False))
    if lower:
        return Normalizer((_from_state({"type": "Lowercase"}),), _CHARACTERWISE["Lowercase"])
    return _of_sentencepiece(getattr(tokenizer, "sp_model", None))


def _of_sentencepiece(model: Any) -> Normalizer | None:
    """NFKC, which is what a SentencePiece model's map amounts to, if the model changes a ligature."""
    if model is None or "fi" not in model.normalize("ﬁ"):
        return None
    return Normalizer((_from_state({"type": "NFKC"}),), _CHARACTERWISE["Precompiled"])


def _flattened(state: Any) -> list[dict[str, Any]]:
    if not state:
        return []
    if state["type"] == "Sequence":
        return [part for inner in state["normalizers"] for part in _flattened(inner)]
    return [state]


def _from_state(state: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    bare = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}, "normalizer": state}
    return Tokenizer.from_str(json.dumps(bare)).normalizer
