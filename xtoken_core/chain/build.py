"""Build the chain tables of a pair of tokenizers.

A path says how far the other side can come inside a token: it is a sequence of the other
side's tokens with which the spellings of some tokens begin. At such a node the tokens that share it are distinguished
by their next piece's root, or by ending exactly there.

That a token has ended is a decision of its own where the tokenizer would have written a longer one for the text that
would have continued it. BPE mostly would. A Unigram chooses the most likely cut of a whole word and ends "t" before "y"
although it has "ty", so that the next token does not say whether "t" has ended: its tokens have no end terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtoken_core.alignment.special_tokens import SpecialTokens, with_special_tokens
from xtoken_core.alignment.tables import TEXT, TokenTable, token_table
from xtoken_core.alignment.token_arrays import BOS, BOS_OR_EOS, EOS, UNKNOWN_ROLE, build_token_arrays, compared_pieces
from xtoken_core.chain.files import read_tables, write_tables
from xtoken_core.chain.live_sets import LiveSets, everything_live, live_sets
from xtoken_core.chain.models import bpe_model, is_unigram
from xtoken_core.chain.spelling import REASONS, Spellings, spellings, word_start_texts
from xtoken_core.chain.tables import ChainTables, LiveTable, SideTable
from xtoken_core.errors import InputError
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_core.projection.pair_cache import PairCache
from xtoken_core.projection.retokenize import Retokenizer

ENDS_HERE = -1
"""The class of a token whose spelling is the path itself."""


@dataclass(frozen=True)
class BuiltSide:
    """One side's part of the tables.

    Attributes:
        spelled: Its tokens' spellings by the other side.
        paths: The nodes of its tokens.
        live: Which of its tokens may follow a token of the other side.
    """

    spelled: Spellings
    paths: PieceTrie
    live: LiveSets


@dataclass(frozen=True)
class BuiltTables:
    """Everything static about a pair of tokenizers.

    Attributes:
        roots: The classes of both sides' tokens.
        student: The student's part.
        teacher: The teacher's part.
    """

    roots: Roots
    student: BuiltSide
    teacher: BuiltSide


PARTS = {"tables": 0.11, "writers": 0.31, "spellings": 0.46, "classes": 0.49, "student": 0.92, "teacher": 1.0}


"""Part of the time after which each part is built, for a student's 49,152 tokens and a teacher's 262,145."""


def build_tables(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    special_tokens: SpecialTokens | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> BuiltTables:
    """Spell both vocabularies with each other's tokenizer and derive classes, paths and live sets.

    Args:
        student_tokenizer: Hugging Face fast or slow, or mistral-common's.
        teacher_tokenizer: Likewise.
        special_tokens: Special tokens of the student and their partners, as the aligner takes them.
        progress: Called with the part (0 to 1) that is done.

    Raises:
        ConfigError: `special_tokens` names a token that is not special.
        InputError: The two have no token in common; the text names one and the reason.
    """
    tokenizers = (student_tokenizer, teacher_tokenizer)
    fingerprints = tokenizer_fingerprint(student_tokenizer), tokenizer_fingerprint(teacher_tokenizer)
    tables: tuple[TokenTable, TokenTable] = with_special_tokens(
        token_table(student_tokenizer), token_table(teacher_tokenizer), special_tokens or {}
    )
    progress(PARTS["tables"])
    drops = any(table.drops_whitespace for table in tables)
    # By both normalisers, so that tokens that differ in case or accents only count as one text.
    compared = [compared_pieces(table, [each.normalizer for each in tables], drops) for table in tables]
    writers = [Retokenizer(tokenizer, table) for tokenizer, table in zip(tokenizers, tables, strict=True)]
    progress(PARTS["writers"])
    texts = [word_start_texts(tokenizer, table) for tokenizer, table in zip(tokenizers, tables, strict=True)]
    spelled = [spellings(tables[k], texts[k], compared[k], writers[1 - k], compared[1 - k]) for k in (0, 1)]
    progress(PARTS["spellings"])
    arrays = build_token_arrays(tables[0], tables[1], compared[0], compared[1])
    # Unknown tokens have no role to pair by; the absent token at the end is no token at all.
    roles = [np.where(side.role == UNKNOWN_ROLE, 0, side.role)[:-1] for side in (arrays.student, arrays.teacher)]
    specials = special_pairs(roles[0], roles[1], both=BOS_OR_EOS, end=EOS, begin=BOS)
    roots = find_roots(spelled[0], spelled[1], specials)
    if not roots.common:
        raise InputError(_no_common_token(tables[0], spelled[0]))
    progress(PARTS["classes"])
    sides = []
    for k, other_roots in ((0, roots.teacher), (1, roots.student)):
        spaces = np.flatnonzero([text == b" " for text in compared[1 - k]])
        paths = build_piece_trie(spelled[k], other_roots, spaces, end_terms=not is_unigram(tokenizers[k]))
        if fingerprints[0] == fingerprints[1]:  # the other side's cuts are this side's own
            live = everything_live(len(tables[1 - k]), len(tables[k]))
        else:
            model = bpe_model(tokenizers[1 - k], writers[1 - k])
            live = live_sets(model, writers[1 - k], texts[k], spelled[k])
        sides.append(BuiltSide(spelled[k], paths, live))
        progress(PARTS["student" if k == 0 else "teacher"])
    return BuiltTables(roots, sides[0], sides[1])


def as_tensors(built: BuiltTables) -> ChainTables:
    """Return the built arrays as tensors on the CPU, which share their memory where the types are equal."""
    student = _side(built.student, built.roots.student)
    return ChainTables(student, _side(built.teacher, built.roots.teacher), built.roots.count, built.roots.common)


def cached_tables(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    directory: Path | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> ChainTables:
    """Read the tables of two tokenizers, and build and write them first if there are none.

    A file of another version, of another pair or a damaged one is built again, and the log says so.

    Args:
        student_tokenizer: A tokenizer, see `build_tables`.
        teacher_tokenizer: Likewise.
        directory: Where the files are; None: the user's cache.
        special_tokens: Special tokens of the student and their partners, as for `build_tables`.

    Raises:
        OutputError: The file cannot be written.
    """
    prints = tokenizer_fingerprint(student_tokenizer), tokenizer_fingerprint(teacher_tokenizer)
    cache = PairCache(directory)

    def write(path: Path) -> None:
        built = build_tables(student_tokenizer, teacher_tokenizer, special_tokens)
        write_tables(as_tensors(built), path, prints, special_tokens)

    return read_tables(cache.file("chain", prints, write, special_tokens))


def _side(built: BuiltSide, roots: np.ndarray) -> SideTable:
    live = {field.name: _tensor(getattr(built.live, field.name)) for field in fields(LiveTable)}
    nodes = {field.name: _tensor(getattr(built.paths, field.name)) for field in fields(built.paths)}
    return SideTable(
        root=_narrow(roots),
        spelling_start=_narrow(built.spelled.start),
        piece=_narrow(built.spelled.piece),
        status=torch.from_numpy(built.spelled.status),
        live=LiveTable(**live),
        **nodes,
    )


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _narrow(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _no_common_token(student: TokenTable, spelled: Spellings) -> str:
    """Return the message for a pair without common tokens, with the first token of text and its reason."""
    text = np.flatnonzero(np.asarray(student.kinds) == TEXT)
    example = "the student's tokenizer has no token of text"
    if len(text):
        token = int(text[0])
        piece = student.pieces[token].decode("utf-8", "backslashreplace")
        example = f"token {token} of the student ({piece!r}): {REASONS[int(spelled.status[token])]}"
    return f"the two tokenizers have no token in common, so that nothing can be compared; {example}"


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


@dataclass(frozen=True)
class Roots:
    """The class of every token of both sides; class `count` is that of tokens without a root.

    Attributes:
        count: How many classes there are: common text tokens, then pairs of specials of one role.
        common: How many of them are common text tokens.
        student: `[V_s]` int64.
        teacher: `[V_t]` int64.
    """

    count: int
    common: int
    student: np.ndarray
    teacher: np.ndarray


def find_roots(student: Spellings, teacher: Spellings, specials: np.ndarray) -> Roots:
    """Follow first pieces from side to side until a common token.

    A pair with `spell(v) = [w]` and `spell(w) = [v]` is common. The root of any other token is that of the first piece
    of its spelling.

    Args:
        student: The teacher's spellings of the student's tokens.
        teacher: The student's spellings of the teacher's tokens.
        specials: `[n, 2]` int64, pairs (student id, teacher id) of one role.
    """
    V_s, V_t = len(student.status), len(teacher.status)
    # Common by spelling in both directions, not by bytes: a token that is never written must not be a class.
    single = np.flatnonzero(student.count == 1)
    partner = student.first[single]
    mutual = (teacher.count[partner] == 1) & (teacher.first[partner] == single)
    pairs = np.concatenate([np.stack([single[mutual], partner[mutual]], axis=1), specials.reshape(-1, 2)])
    # Both vocabularies as nodes of one graph, the teacher's after the student's; a node points to its first piece.
    node = np.arange(V_s + V_t)
    points = np.concatenate([student.first + V_s, teacher.first])
    spelled = np.concatenate([student.count > 0, teacher.count > 0])
    points = np.where(spelled, points, node)
    of_class = np.full(V_s + V_t, len(pairs))
    for side, offset in ((0, 0), (1, V_s)):
        at = pairs[:, side] + offset
        # Common tokens point at themselves: they are where the search ends.
        points[at], of_class[at] = at, np.arange(len(pairs))
    for _ in range(int(V_s + V_t).bit_length()):  # every step doubles how far a node sees
        further = points[points]
        if (further == points).all():
            break
        points = further
    root = of_class[points]
    return Roots(len(pairs), int(mutual.sum()), root[:V_s], root[V_s:])


def special_pairs(student_roles: np.ndarray, teacher_roles: np.ndarray, both: int, end: int, begin: int) -> np.ndarray:
    """Pair specials of one role, every token once.

    Args:
        student_roles: `[V_s]` int64, a number per role, 0 for text and for tokens without a role.
        teacher_roles: `[V_t]` int64, numbered alike.
        both: The number of a token that begins and ends a text; it pairs with an end first, then with a beginning.
        end: The number of a token that ends a text.
        begin: The number of a token that begins one.

    Returns:
        `[n, 2]` int64 pairs.
    """
    ours, theirs = (
        {int(roles[i]): i for i in np.flatnonzero(roles)[::-1].tolist()} for roles in (student_roles, teacher_roles)
    )
    found: dict[int, int] = {}
    for role, index in ours.items():
        wanted = (both, end, begin) if role == both else (role, both) if role in (end, begin) else (role,)
        partner = next((theirs[name] for name in wanted if name in theirs), None)
        if partner is not None and partner not in found.values():
            found[index] = partner
    return np.array(sorted(found.items()), dtype=np.int64).reshape(-1, 2)
