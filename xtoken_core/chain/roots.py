"""Common tokens and roots: the classes in which two vocabularies are compared where both begin a token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtoken_core.chain.spelling import Spellings


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
