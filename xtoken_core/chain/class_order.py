"""Class order: the teacher's tokens renumbered so that common tokens are read in sequence.

With the rows of its head in this order, a teacher's logits come with the token of class c in column c, and all other
tokens behind them by class. Tables and tokens are renumbered once; nothing else knows of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from xtoken_core.chain.tables import ChainTables


def class_order(tables: ChainTables) -> Int[Tensor, " V_t"]:
    """Return the teacher's tokens in class order: first the one of every class that comes first among its members.

    Args:
        tables: On the CPU.
    """
    root = tables.teacher.root.long()
    single = tables.teacher.spelling_start.diff() == 1
    # Stable sorts: by id, then single tokens first, then by class.
    order = torch.argsort((~single).long(), stable=True)
    order = order[torch.argsort(root[order], stable=True)]
    rank = torch.ones(len(order), dtype=torch.int64)
    sorted_root = root[order]
    rank[1:] = (sorted_root[1:] == sorted_root[:-1]).long()
    rank[:1] = 0
    rank[sorted_root == tables.classes] = 1  # a class of its own at the end: no column of this number exists
    return order[torch.argsort(rank, stable=True)]


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
