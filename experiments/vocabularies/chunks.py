"""Count a text's tokens and chunks by what the chain tables say of them."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from xtoken_core.alignment import TokenAligner
from xtoken_core.alignment.tables import SPECIAL
from xtoken_core.chain import ChainTables
from xtoken_core.chain.report import shape_of
from xtoken_core.chain.tables import LiveTable
from xtoken_core.chain.word_splits import JOINED, KEPT
from xtoken_core.tokenizing import TextTokenizer

CLASSES = ("spaces", "line ends", "numerals", "other")
"""What a chunk spells: white space alone without and with a line end; digits, with or without white space; the rest."""


def class_of(text: bytes) -> str:
    """Return the class of a chunk.

    >>> [class_of(text) for text in (b"    ", bytes([10, 32]), b" 42", b"a b")]
    ['spaces', 'line ends', 'numerals', 'other']
    """
    string = text.decode("utf-8", "replace")
    if string.isspace():
        return "line ends" if "\n" in string else "spaces"
    digits = [unicodedata.category(char) == "Nd" for char in string if not char.isspace()]
    return "numerals" if digits and all(digits) else "other"


def may_follow(live: LiveTable, before: int, token: int) -> bool:
    """Return whether a live set has a token.

    Args:
        live: The sets.
        before: The other side's last token.
        token: The token that begins after it.
    """
    state = int(live.state[int(live.tail[before]), int(live.head[token])])
    if state != JOINED:
        return state == KEPT
    at, place, first = before, int(live.position[token]), True
    while at >= 0:
        begin = int(live.rule_start[at] if first else live.tail_start[at])
        end = int(live.rule_start[at + 1]) if first else begin + int(live.tail_count[at])
        if bool((live.point[begin:end] == place).any()):
            return False
        if bool(((live.low[begin:end] <= place) & (place < live.high[begin:end])).any()):
            return False
        at, first = (at, False) if first else (int(live.right[at]), False)
    return True


class Counts:
    """Counts over texts.

    Args:
        tokenizers: The student's and the teacher's.
        tables: Their tables.
    """

    def __init__(self, tokenizers: tuple[Any, Any], tables: ChainTables) -> None:
        self._encoders = [TextTokenizer(tokenizer, name) for tokenizer, name in zip(tokenizers, "st", strict=True)]
        self._aligner = TokenAligner(*tokenizers)
        self._tables = tables
        self._sides = tables.student, tables.teacher
        self._tokens = [0, 0]
        self._rootless: list[Counter[int]] = [Counter(), Counter()]
        self._incorrect = 0
        self._classes: dict[str, Counter[str]] = defaultdict(Counter)
        self._live: dict[tuple[int, int, int], bool] = {}

    def add(self, texts: Iterable[str]) -> None:
        """Count texts."""
        for text in texts:
            self._add(text)

    def _add(self, text: str) -> None:
        ids = [encoder.encode([text], specials=False)[0].tolist() for encoder in self._encoders]
        if not all(ids):
            return
        for k, own in enumerate(ids):
            special = np.asarray(self._encoders[k].table.kinds)[own] == SPECIAL
            missing = (self._sides[k].root[own] == self._tables.classes).numpy() & ~special
            self._tokens[k] += len(own)
            self._rootless[k].update(np.asarray(own)[missing].tolist())
        batch = self._aligner.align(
            *(torch.tensor([own]) for own in ids),
            student_attention_mask=None,
            teacher_attention_mask=None,
            texts=[text],
        )
        chunk_ids = batch.student_chunk_id[0].tolist(), batch.teacher_chunk_id[0].tolist()
        members: tuple[dict[int, list[int]], ...] = ({}, {})
        for chunks, own in zip(members, chunk_ids, strict=True):
            for at, chunk in enumerate(own):
                chunks.setdefault(chunk, []).append(at)
        for chunk, correct in enumerate(batch.pair_is_correct[0].tolist()[: int(batch.num_chunks[0])]):
            if correct:
                self._add_chunk(ids, [each.get(chunk, []) for each in members])
            else:
                self._incorrect += 1

    def _add_chunk(self, ids: Sequence[Sequence[int]], at: Sequence[Sequence[int]]) -> None:
        if not all(at):
            return
        pieces = self._encoders[0].table.pieces
        counts = self._classes[class_of(b"".join(pieces[ids[0][i]] for i in at[0]))]
        counts["chunks"] += 1
        counts[shape_of(len(at[0]), len(at[1]))] += 1
        first = [own[where[0]] for own, where in zip(ids, at, strict=True)]
        roots = [int(side.root[token]) for side, token in zip(self._sides, first, strict=True)]
        counts["roots differ"] += roots[0] != roots[1]
        if min(where[0] for where in at):
            before = [own[where[0] - 1] for own, where in zip(ids, at, strict=True)]
            counts["not live"] += not all(self._follows(k, before[1 - k], first[k]) for k in (0, 1))

    def _follows(self, k: int, before: int, token: int) -> bool:
        key = k, before, token
        if key not in self._live:
            self._live[key] = may_follow(self._sides[k].live, before, token)
        return self._live[key]

    def summary(self) -> dict[str, Any]:
        """Return counts; `roots differ` and `not live` are starts of chunks."""
        examples = []
        for k in (0, 1):
            pieces = self._encoders[k].table.pieces
            examples.append([pieces[token].decode("utf-8", "backslashreplace") for token, _ in
                             self._rootless[k].most_common(8)])  # fmt: skip
        return {
            "tokens": self._tokens,
            "rootless": [sum(each.values()) for each in self._rootless],
            "rootless examples": examples,
            "incorrect chunks": self._incorrect,
            "classes": {name: dict(self._classes[name]) for name in CLASSES if name in self._classes},
        }
