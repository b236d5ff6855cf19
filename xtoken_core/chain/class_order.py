"""Class order: the teacher's tokens renumbered so that both sides' rows are read in sequence.

With the rows of its head in this order, a teacher's logits come with the token of a class that has one token on each
side in the column of the student's token, and all other tokens between them in the order in which their classes are
compared. Tables and tokens are renumbered once; nothing else knows of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from xtoken_core.chain.class_layout import class_layout
from xtoken_core.chain.tables import ChainTables


def class_order(tables: ChainTables) -> Int[Tensor, " V_t"]:
    """Return the teacher's tokens in class order.

    Args:
        tables: On the CPU.
    """
    roots = [side.root.numpy().astype(np.int64) for side in (tables.student, tables.teacher)]
    layout = class_layout(roots[0], roots[1], tables.classes)
    tokens = [np.flatnonzero(layout.plain[root]) for root in roots]
    column, token = (each[np.argsort(root[each])] for root, each in zip(roots, tokens, strict=True))
    V = len(roots[1])
    order = np.full(V, -1)
    order[column[column < V]] = token[column < V]
    members = layout.members[1]
    order[order < 0] = np.concatenate([members[members >= 0], token[column >= V]])
    return torch.from_numpy(order)


def in_class_order(tables: ChainTables, order: Int[Tensor, " V_t"]) -> ChainTables:
    """Return the tables of the renumbered teacher.

    Args:
        tables: On the CPU.
        order: The result of `class_order`: old ids by new id.
    """
    new = torch.empty_like(order)
    new[order] = torch.arange(len(order))
    student, teacher = tables.student, tables.teacher
    counts = teacher.spelling_start.diff().long()
    entries = _slices(teacher.spelling_start[:-1].long()[order], counts[order])
    live = student.live
    rules = _slices(live.rule_start[:-1].long()[order], live.rule_start.diff().long()[order])
    # Slices of tails are those of the rules as they were, so these stay and the others follow them.
    own = live.rule_start.diff().long()[order]
    R = len(live.point)
    point, low, high = (torch.cat([each, each[rules]]) for each in (live.point, live.low, live.high))
    right = live.right.long()[order]
    student_live = replace(
        live,
        tail=live.tail[order],
        rule_start=torch.cat([torch.zeros(1, dtype=torch.int64), own.cumsum(0)]).add(R).to(live.rule_start.dtype),
        tail_start=live.tail_start[order],
        tail_count=live.tail_count[order],
        right=torch.where(right >= 0, new[right.clamp(min=0)], -1).to(live.right.dtype),
        point=point,
        low=low,
        high=high,
    )
    teacher_live = replace(teacher.live, head=teacher.live.head[order], position=teacher.live.position[order])
    return replace(
        tables,
        student=replace(student, piece=new[student.piece.long()].to(student.piece.dtype), live=student_live),
        teacher=replace(
            teacher,
            root=teacher.root[order],
            spelling_start=torch.cat([torch.zeros(1, dtype=torch.int64), counts[order].cumsum(0)]).to(
                teacher.spelling_start.dtype
            ),
            piece=teacher.piece[entries],
            node=teacher.node[entries],
            member=new[teacher.member.long()].to(teacher.member.dtype),
            status=teacher.status[order],
            live=teacher_live,
        ),
    )


def _slices(start: Tensor, count: Tensor) -> Tensor:
    """Return the indices of slices, one after the other."""
    owner = torch.repeat_interleave(torch.arange(len(count)), count)
    return start[owner] + torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
