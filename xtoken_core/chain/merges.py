"""The merge trees of a BPE vocabulary, and which pairs of its tokens cannot stand side by side.

BPE writes a text by applying its merge rules in order of rank. A token is a binary tree of rules. Two tokens w, y that
follow each other in a tokenized text were kept apart although every rule was tried: no rule joins a token on the
*right spine* of w (w, its right child, the right child of that, ...) with one on the *left spine* of y before both have
been used up by their own trees. This is decided by the two trees alone, so that the set of y that may follow w is a
union of few intervals once the tokens y are in depth-first order of their left children.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NONE = -1
NEVER = np.int64(1) << 60
"""The time at which a token that is not a child of another is used up."""


@dataclass(frozen=True)
class MergeRules:
    """Merge rules `left + right -> merged`; the row is the rank.

    Attributes:
        left: `[R]` int64 token ids.
        right: `[R]` int64.
        merged: `[R]` int64.
    """

    left: np.ndarray
    right: np.ndarray
    merged: np.ndarray


@dataclass(frozen=True)
class MergeForest:
    """The tree of every token, and the rules by their left token.

    Attributes:
        left: `[V]` int64, the left child; -1 for a token that no rule made.
        right: `[V]` int64, likewise.
        formed: `[V]` int64, the time at which a token appears: the largest rank of its tree, -1 without a tree.
        canonical: `[V]` bool, the tokenizer writes the token's own text as this token.
        rules: The rules sorted by (left token, time).
        rule_time: `[R]` int64, when a rule is applied to its two tokens: its rank, or the time at which the later of
            them appears where that is larger.
        rule_start: `[V + 1]` int64, where a left token's rules begin.
    """

    left: np.ndarray
    right: np.ndarray
    formed: np.ndarray
    canonical: np.ndarray
    rules: MergeRules
    rule_time: np.ndarray
    rule_start: np.ndarray


def merge_forest(rules: MergeRules, atoms: list[list[int]]) -> MergeForest:
    """Apply the rules to every token's own text.

    Args:
        rules: By rank.
        atoms: By id, the ids that a token's text consists of before any rule is applied; empty for a token that the
            rules do not make (a special).
    """
    V = len(atoms)
    table = _PairTable(rules, V)
    left, right = np.full(V, NONE), np.full(V, NONE)
    formed, canonical = np.full(V, NONE), np.zeros(V, dtype=bool)
    lengths = np.fromiter(map(len, atoms), dtype=np.int64, count=V)
    # Texts of one length in lockstep: a few hundred passes instead of one for each of a vocabulary's tokens.
    for length in np.unique(lengths[lengths > 0]).tolist():
        tokens = np.flatnonzero(lengths == length)
        pieces = np.array([atoms[i] for i in tokens.tolist()], dtype=np.int64)  # [n, length]
        last, latest, whole = _apply(table, pieces)
        canonical[tokens] = whole == tokens
        made = canonical[tokens] & (last >= 0)
        # The last rule that was applied made the token: its two sides are the children.
        left[tokens[made]], right[tokens[made]] = rules.left[last[made]], rules.right[last[made]]
        formed[tokens[made]] = latest[made]
    # A rule of low rank waits for its operands, which rules of higher rank may make.
    time = np.maximum(np.arange(len(rules.left)), np.maximum(formed[rules.left], formed[rules.right]))
    order = np.lexsort((time, rules.left))
    counts = np.bincount(rules.left, minlength=V)
    return MergeForest(
        left=left,
        right=right,
        formed=formed,
        canonical=canonical,
        rules=MergeRules(rules.left[order], rules.right[order], rules.merged[order]),
        rule_time=time[order],
        rule_start=np.concatenate([[0], np.cumsum(counts)]),
    )


class _PairTable:
    """The rank and the result of every pair that has a rule, by binary search."""

    def __init__(self, rules: MergeRules, size: int) -> None:
        key = rules.left * size + rules.right
        self.keys, first = np.unique(key, return_index=True)  # the lowest rank of a pair that has two rules
        self.rank, self.merged, self.size = first, rules.merged[first], size

    def __call__(self, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rank (`NEVER` without a rule) and merged id of each pair."""
        key = left * self.size + right
        at = np.minimum(np.searchsorted(self.keys, key), max(len(self.keys) - 1, 0))
        if not len(self.keys):
            return np.full(key.shape, NEVER), np.full(key.shape, NONE)
        # An atom that is no token is -1, and its key could be that of another pair.
        hit = (self.keys[at] == key) & (left >= 0) & (right >= 0)
        return np.where(hit, self.rank[at], NEVER), np.where(hit, self.merged[at], NONE)


def _apply(table: _PairTable, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply the rules to `n` texts of one length, in lockstep: the lowest rank first, the leftmost of equals.

    Args:
        table: The rules.
        pieces: `[n, L]` int64 ids.

    Returns:
        `[n]` each: the rank of the last rule applied (-1: none), the largest rank applied, and the only token left
        (-1: several are).
    """
    n, L = pieces.shape
    last, latest, whole = np.full(n, NONE), np.full(n, NONE), np.full(n, NONE)
    active = np.arange(n)
    for length in range(L, 0, -1):
        if length == 1:
            whole[active] = pieces[:, 0]
            break
        rank, merged = table(pieces[:, :-1], pieces[:, 1:])  # [n, length - 1]
        # The first minimum: of equal ranks the leftmost pair is merged first, as BPE does.
        at = rank.argmin(axis=1)
        row = np.arange(len(active))
        best = rank[row, at]
        going = best < NEVER
        if not going.all():
            active, pieces, at, best, merged = active[going], pieces[going], at[going], best[going], merged[going]
            row = np.arange(len(active))
        if not len(active):
            break
        last[active], latest[active] = best, np.maximum(latest[active], best)
        # [n, length]: every text loses exactly one place, so that the rest is a matrix again.
        kept = np.arange(length)[None, :] != at[:, None] + 1
        joined = pieces.copy()
        joined[row, at] = merged[row, at]
        pieces = joined[kept].reshape(len(active), length - 1)
    return last, latest, whole


@dataclass(frozen=True)
class Followers:
    """Tokens that may follow each token, as intervals over the tokens in depth-first order.

    The tokens that cannot follow w are those of the intervals `low[r] : high[r]` and of the points `point[r]`, for the
    rules r of w's own slice `rule_start[w] : rule_start[w + 1]` and of the slices
    `tail_start[a] : tail_start[a] + tail_count[a]` for a = w, `right[w]`, `right[right[w]]`, ...

    Attributes:
        position: `[V]` int32, a token's place in depth-first order.
        point: `[R]` int32.
        low: `[R]` int32.
        high: `[R]` int32.
        rule_start: `[V + 1]` int32.
        tail_start: `[V]` int32.
        tail_count: `[V]` int32.
        right: `[V]` int32, -1 = none.
    """

    position: np.ndarray
    point: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rule_start: np.ndarray
    tail_start: np.ndarray
    tail_count: np.ndarray
    right: np.ndarray


def followers(forest: MergeForest) -> Followers:
    """Compute for every token which tokens cannot follow it.

    A rule (a, b) of time r separates w and y if a lies on the right spine of w and is used up there after r, and b on
    the left spine of y and is used up there at r or later: of two rules of one rank the leftmost is applied first.
    """
    position, end, child_start, children = _depth_first(forest)
    b = forest.rules.right
    # Children of b in order of time: those formed at the rule's time or later, and what they begin, cannot follow.
    # Ascending within each slice, which is what the bisections below need.
    key = forest.formed[children]
    low = _first_not_before(key, child_start[b], child_start[b + 1], forest.rule_time)
    inside = low < child_start[b + 1]
    begin = np.where(
        inside, position[children[np.minimum(low, max(len(children) - 1, 0))]] if len(children) else 0, end[b]
    )
    a = forest.right
    has = a >= 0
    start = np.where(has, forest.rule_start[a], 0)
    stop = np.where(has, forest.rule_start[np.where(has, a + 1, 0)], 0)
    # Only rules before the token was formed: a later one no longer finds `a`, which the token has used up.
    count = _first_not_before(forest.rule_time, start, stop, np.where(has, forest.formed, 0)) - start
    to = np.int32
    return Followers(
        position=position.astype(to),
        point=position[b].astype(to),
        low=begin.astype(to),
        high=end[b].astype(to),
        rule_start=forest.rule_start.astype(to),
        tail_start=start.astype(to),
        tail_count=np.where(has, count, 0).astype(to),
        right=forest.right.astype(to),
    )


def _depth_first(forest: MergeForest) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Order tokens so that those that begin with a token's tree follow it, its children by time.

    Returns:
        `position` and `end` `[V]`: the tokens whose left spine holds i stand at `position[i] : end[i]`; the children as
        `child_start` `[V + 1]` and `children`, ascending by time.
    """
    V = len(forest.left)
    has = np.flatnonzero(forest.left >= 0)
    order = has[np.lexsort((forest.formed[has], forest.left[has]))]
    child_start = np.concatenate([[0], np.cumsum(np.bincount(forest.left[has], minlength=V))])
    # A child is longer than its parent, so sizes add up from the latest formed to the first.
    depth = np.zeros(V, dtype=np.int64)
    above = forest.left.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, forest.left[above], NONE)
    size = np.ones(V, dtype=np.int64)
    levels = [np.flatnonzero(depth == d) for d in range(int(depth.max(initial=0)) + 1)]
    for level in reversed(levels[1:]):
        np.add.at(size, forest.left[level], size[level])
    position = np.zeros(V, dtype=np.int64)
    roots = levels[0] if levels else np.zeros(0, dtype=np.int64)
    position[roots] = np.cumsum(size[roots]) - size[roots]
    before = np.zeros(V, dtype=np.int64)  # sizes of the siblings that come first
    sizes = np.cumsum(size[order]) - size[order]
    before[order] = sizes - sizes[child_start[forest.left[order]]] if len(order) else 0
    for level in levels[1:]:
        position[level] = position[forest.left[level]] + 1 + before[level]
    return position, position + size, child_start, order


def _first_not_before(key: np.ndarray, start: np.ndarray, stop: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return of each slice `start : stop` of `key`, ascending within it, the first index whose key is >= `value`."""
    low, high = start.copy(), stop.copy()
    while True:
        open_ = low < high
        if not open_.any():
            return low
        # All slices are bisected at once: as many rounds as the longest slice has bits.
        middle = (low + high) // 2
        less = open_ & (key[np.minimum(middle, max(len(key) - 1, 0))] < value)
        low = np.where(less, middle + 1, low)
        high = np.where(open_ & ~less, middle, high)
