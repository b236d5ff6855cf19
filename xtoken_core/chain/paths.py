"""Paths: how far the other side can come inside a token, and what can follow there.

A path is a sequence of the other side's tokens with which the spellings of some tokens begin. At such a node
the tokens that share it are distinguished by their next piece's root, or by ending exactly there.

That a token has ended is a decision of its own where the tokenizer would have written a longer one for the text that
would have continued it. BPE mostly would. A Unigram chooses the most likely cut of a whole word and ends "t" before "y"
although it has "ty", so that the next token does not say whether "t" has ended: its tokens have no end terms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from xtoken_core.chain.spelling import Spellings

ENDS_HERE = -1
"""The class of a token whose spelling is the path itself."""


@dataclass(frozen=True)
class PieceTrie:
    """Trie over the spellings of one tokenizer's tokens in the other's pieces.

    Attributes:
        node: `[n]` int32, for every piece of every spelling the node reached with it; -1 where every token ends, and
            with the last piece where this side has no end terms.
        member_start: `[N + 1]` int32, where a node's tokens begin.
        member: `[m]` int32, token ids of this side.
        member_slot: `[m]` int32, the slot of the token's class.
        slot_start: `[N + 1]` int32, where a node's slots begin.
        slot_class: `[S]` int32, the classes of a node, each once: root classes of the other side's next token, or
            `ENDS_HERE`.
        bare_space: `[N]` bool, the path is a single space.
    """

    node: np.ndarray
    member_start: np.ndarray
    member: np.ndarray
    member_slot: np.ndarray
    slot_start: np.ndarray
    slot_class: np.ndarray
    bare_space: np.ndarray


def build_piece_trie(
    spelled: Spellings, other_roots: np.ndarray, spaces: np.ndarray, *, end_terms: bool = True
) -> PieceTrie:
    """Build the nodes.

    Args:
        spelled: Of this side's tokens, by the other side.
        other_roots: `[V_o]` int64, classes of the other side's tokens.
        spaces: Ids of the other side whose text is a single space.
        end_terms: True to compare whether a token has ended, after its last piece.
    """
    count, start = spelled.count, spelled.start[:-1]
    V_o = len(other_roots)
    token = np.repeat(np.arange(len(count)), count)
    flat = np.full(len(spelled.piece), -1, dtype=np.int64)
    bare = np.zeros(0, dtype=bool)
    nodes, active, above = 0, np.flatnonzero(count > 0), np.zeros(int((count > 0).sum()), dtype=np.int64)
    # One level of the trie per turn: `active` are the tokens with a piece at this depth, `above` the nodes that they
    # have reached so far (0 for all before the first piece). Tokens of one node and next piece share the next node.
    for depth in range(int(count.max(initial=0))):
        piece = spelled.piece[start[active] + depth]  # [active]
        # Node and next piece in one number: unique pairs are the nodes of the next depth.
        key, inverse = np.unique(above * V_o + piece, return_inverse=True)
        flat[start[active] + depth] = nodes + inverse  # [n] node that is reached with each piece of all spellings
        is_space = np.isin(key % V_o, spaces) if depth == 0 else np.zeros(len(key), dtype=bool)
        bare = np.concatenate([bare, is_space])
        going = count[active] > depth + 1
        above, active, nodes = nodes + inverse[going], active[going], nodes + len(key)
    # The class that continues from the node: that of the following piece, or none behind a token's last piece.
    ends = np.arange(len(flat)) == np.repeat(spelled.start[1:] - 1, count)
    following = np.append(spelled.piece[1:], 0)
    cls = np.where(ends, ENDS_HERE, other_roots[following] if len(flat) else 0)
    paths = _kept(flat, token, cls, nodes, bare)
    return paths if end_terms else replace(paths, node=np.where(ends, -1, paths.node).astype(np.int32))


def _kept(flat: np.ndarray, token: np.ndarray, cls: np.ndarray, nodes: int, bare: np.ndarray) -> PieceTrie:
    """Drop the nodes at which all tokens end and number the others anew."""
    # Room for `ENDS_HERE`, -1, which counts as 0 below.
    width = int(cls.max(initial=0)) + 2
    # A slot is a pair of a node and a class; classes count from ENDS_HERE, so that 0 is the end of a token.
    slots, slot_of = np.unique(flat * width + cls + 1, return_inverse=True)
    slot_node = slots // width  # [slots]
    continues = slots % width > 0
    # A node is kept if a token continues from it; elsewhere all tokens end and there is nothing to distinguish.
    chosen = np.bincount(slot_node[continues], minlength=nodes) > 0
    number = np.where(chosen, np.cumsum(chosen) - 1, -1)
    slot_kept = chosen[slot_node]
    slot_number = np.cumsum(slot_kept) - 1
    member_kept = np.flatnonzero(chosen[flat]) if len(flat) else np.zeros(0, dtype=np.int64)
    # Members by node, then by token id.
    order = member_kept[np.lexsort((token[member_kept], flat[member_kept]))]
    N, to = int(chosen.sum()), np.int32
    return PieceTrie(
        node=(number[flat] if len(flat) else flat).astype(to),
        member_start=_starts(number[flat[order]], N),
        member=token[order].astype(to),
        member_slot=slot_number[slot_of[order]].astype(to),
        slot_start=_starts(number[slot_node[slot_kept]], N),
        slot_class=(slots[slot_kept] % width - 1).astype(to),
        bare_space=bare[chosen],
    )


def _starts(group: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.bincount(group, minlength=count))]).astype(np.int32)
