"""Live sets: which tokens of one side can follow where the other side's tokenizer has ended a token.

A student that has just written " 4" knows that no digit follows, since "40" is another token of its; a teacher that
splits digits does not. The comparison at the start of a chunk is therefore conditioned on both sides' cuts: after the
teacher's token w only those student tokens x count for which the teacher's tokenizer cuts `bytes(w) + bytes(x)` after
w.

The test is on the bare string of two tokens. All pairs are far too many (49 thousand times 262 thousand), but the
outcome has structure: a split into words between two kinds of characters, and merge trees inside a word (`merges`).
For other models every pair is tested if there are few enough; else every token counts as live.

The test is an approximation where more than the last token matters (a tokenizer that looks further back or ahead).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xtoken_core.alignment.tables import TEXT
from xtoken_core.chain.merges import Followers, followers
from xtoken_core.chain.models import BpeModel
from xtoken_core.chain.spelling import Spellings
from xtoken_core.chain.tables import BROKEN, JOINED, KEPT
from xtoken_core.chain.word_splits import WordSplits, word_splits
from xtoken_core.projection.retokenize import Retokenizer

MOST_PAIRS = 1_500_000
"""Pairs of tokens that are tested one by one, at most."""
# Texts that are tokenized at once: enough for all cores, and a list of them stays small.
_BLOCK = 200_000
_LOG = logging.getLogger("xtoken.chain")


@dataclass(frozen=True)
class LiveSets(Followers):
    """Live sets: the tokens x of one side that may follow the tokens w of the other.

    x may follow w if `state[tail[w], head[x]]` is `KEPT`; if it is `JOINED + k`, if `position[k, x]` lies in none of
    w's intervals, which are those of `merges.Followers` over the tokens w.

    Attributes:
        position: `[K, V_x]` int32, the place of the first piece of x, and of its k-th shorter beginning (see
            `word_splits`); `width - 1` without one.
        tail: `[V_w]` int32.
        head: `[V_x]` int32.
        state: `[tails, heads]` uint8.
        width: How many places there are, that of tokens without one included.
        depth: The most slices of intervals that a token w has.
        method: `merges`, `pairs` or `none`.
    """

    tail: np.ndarray
    head: np.ndarray
    state: np.ndarray
    width: int
    depth: int
    method: str


def live_sets(model: BpeModel | None, target: Retokenizer, texts: Sequence[bytes], spelled: Spellings) -> LiveSets:
    """Build the live sets after the tokens w of the target's tokenizer.

    Args:
        model: The target's merge rules; None: it has none that are known.
        target: The tokenizer that cuts.
        texts: By id, the text of the tokens x.
        spelled: The target's pieces of the tokens x.
    """
    candidates = [text if has else b"" for text, has in zip(texts, (spelled.count > 0).tolist(), strict=True)]
    if model is not None:
        return _by_merges(model, target, candidates, spelled)
    before = _own_text(target)
    pairs = sum(map(bool, before)) * sum(map(bool, candidates))
    if pairs <= MOST_PAIRS:
        return _by_pairs(target, before, candidates)
    _LOG.warning(
        "chain: %d pairs of tokens are too many to be tested one by one and the tokenizer is no BPE: "
        "its cuts are not conditioned on",
        pairs,
    )
    return everything_live(len(before), len(candidates))


def everything_live(after: int, tokens: int) -> LiveSets:
    """Return live sets that leave nothing out."""
    splits = WordSplits(np.zeros(after, np.int32), np.zeros(tokens, np.int32), np.full((1, 1), KEPT, np.uint8))
    return _without_rules(splits, "none")


def _own_text(target: Retokenizer) -> list[bytes]:
    """Return by id the text of the tokens that the tokenizer itself writes their text with; else nothing."""
    pieces = list(target.table.pieces)
    ids, counts = target(pieces)
    first = np.append(ids, -1)[np.cumsum(counts) - counts]
    # A token that its own tokenizer writes otherwise never ends a text of its own, so nothing follows it.
    own = (counts == 1) & (first == np.arange(len(pieces)))
    return [piece if kept else b"" for piece, kept in zip(pieces, own.tolist(), strict=True)]


def _by_merges(model: BpeModel, target: Retokenizer, candidates: Sequence[bytes], spelled: Spellings) -> LiveSets:
    forest = model.forest
    pieces = target.table.pieces
    # With `ignore_merges` a word that is a token is written as one, though its merges end elsewhere.
    written = forest.canonical | (model.whole_words & (np.asarray(target.table.kinds) == TEXT))
    before = [piece if kept else b"" for piece, kept in zip(pieces, written.tolist(), strict=True)]
    splits = word_splits(before, candidates, model.split)
    # A token that no merges make is a whole word: what is joined to it makes another word, without it.
    groups, tail = np.unique(2 * splits.tail + (written & ~forest.canonical), return_inverse=True)
    state = splits.state[groups // 2]
    state[(groups % 2 == 1)[:, None] & (state >= JOINED)] = BROKEN
    found = followers(forest)
    V = len(pieces)
    # [K, V_x]: the first piece of x itself, then of its shorter beginnings, where the common word ends.
    first = np.stack([spelled.first, *(_first_pieces(target, beginnings) for beginnings in splits.shorter)])
    position = np.where(first >= 0, np.append(found.position, V)[first], V).astype(np.int32)
    return LiveSets(
        **vars(found) | {"position": position},
        tail=tail.astype(np.int32),
        head=splits.head,
        state=state,
        width=V + 1,
        depth=_depth(found.right) + 1,
        method="merges",
    )


def _first_pieces(target: Retokenizer, texts: Sequence[bytes]) -> np.ndarray:
    """Return the first piece of each text; -1 for an empty one."""
    # Beginnings repeat: tokens share them by the thousand.
    distinct = sorted(set(texts))
    ids, counts = target(distinct)
    first = np.where(counts > 0, np.append(ids, -1)[np.cumsum(counts) - counts], -1)
    number = {text: at for at, text in enumerate(distinct)}
    return first[[number[text] for text in texts]]


def _depth(right: np.ndarray) -> int:
    """Return the most tokens on a right spine."""
    depth, at = 0, np.arange(len(right))
    while len(at):
        at, depth = right[at], depth + 1
        at = at[at >= 0]
    return depth


def _by_pairs(target: Retokenizer, before: Sequence[bytes], candidates: Sequence[bytes]) -> LiveSets:
    """Tokenize every pair and group the tokens that behave alike."""
    after, tokens = (np.flatnonzero(np.fromiter(map(bool, x), bool, len(x))) for x in (before, candidates))
    live = np.full((len(before), len(candidates)), KEPT, dtype=np.uint8)
    rows = max(1, _BLOCK // max(1, len(tokens)))
    for begin in range(0, len(after), rows):
        block = after[begin : begin + rows].tolist()
        ids, counts = target([before[w] + candidates[x] for w in block for x in tokens.tolist()])
        first = np.append(ids, -1)[np.cumsum(counts) - counts]
        kept = (first == np.repeat(block, len(tokens))) & (counts > 0)
        live[np.ix_(block, tokens)] = np.where(kept, KEPT, BROKEN).reshape(len(block), len(tokens))
    # Rows that are equal, then columns: what is left is the table that word splits would have given.
    distinct, tail = np.unique(live, axis=0, return_inverse=True)
    state, head = np.unique(distinct, axis=1, return_inverse=True)
    splits = WordSplits(tail.reshape(-1).astype(np.int32), head.reshape(-1).astype(np.int32), state)
    return _without_rules(splits, "pairs")


def _without_rules(splits: WordSplits, method: str) -> LiveSets:
    V_w, to = len(splits.tail), np.int32
    none, zeros = np.zeros(0, to), np.zeros(V_w, to)
    return LiveSets(
        tail=splits.tail,
        head=splits.head,
        state=splits.state,
        position=np.zeros((1, len(splits.head)), to),
        width=1,
        depth=0,
        point=none,
        low=none,
        high=none,
        rule_start=np.zeros(V_w + 1, to),
        tail_start=zeros,
        tail_count=zeros,
        right=np.full(V_w, -1, to),
        method=method,
    )
