"""The fraction of a teacher's probability that its listed tokens have at the decisions inside a chunk."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.chain.tables import ChainTables, SideTable
from xtoken_core.ops.chain.events import Inner, SideTokens, find_inner, lay_out
from xtoken_core.ops.chain.ragged import pick, ragged, ragged_sum
from xtoken_core.ops.chain.reference import BLOCK_BYTES, ChainOptions
from xtoken_core.ops.chain.teacher_rows import TeacherRows, TeacherSlice, TopKTeacher


@torch.no_grad()
def kept_mass(
    teacher: TopKTeacher,
    sides: tuple[SideTokens, SideTokens],
    max_chunks: int,
    tables: ChainTables,
    options: ChainOptions,
) -> Float[Tensor, "B P"]:
    """Return the least fraction at the nodes of every chunk; 1 for a chunk without nodes.

    At a node inside the student's token it is the mass of the teacher's listed tokens. Inside the teacher's token it is
    that of the listed tokens among those that begin with the node's path, if an unlisted token has an equal part of
    the tail.

    Args:
        teacher: The teacher's largest probabilities.
        sides: The student's and the teacher's tokens.
        max_chunks: `P`.
        tables: Tables of the two tokenizers, on the teacher's device.
        options: Terms that count.
    """
    layouts = lay_out(sides[0], max_chunks), lay_out(sides[1], max_chunks)
    flags = {"end_terms": options.end_terms, "bare_space": options.bare_space}
    in_student = find_inner(layouts[0], layouts[1], tables.student, **flags, learns=True).without_padding()
    in_teacher = find_inner(layouts[1], layouts[0], tables.teacher, **flags, learns=False).swapped().without_padding()
    rows = TeacherRows(teacher, 1.0)
    chunks = teacher.ids.shape[0] * max_chunks
    least = torch.ones(chunks + 1, dtype=torch.float32, device=teacher.ids.device)
    size = max(1, BLOCK_BYTES // (8 * rows.width))
    for events, side in ((in_student, None), (in_teacher, tables.teacher)):
        for at in range(0, len(events.chunk), size):
            part: Inner = events.part(slice(at, at + size))
            taken = rows.at(part.teacher_row, torch.float32)
            assert taken.tail is not None
            fraction = 1 - taken.tail if side is None else _held_fraction(taken, part, side)
            # Padding has the index -1 and goes to the spare last entry.
            index = torch.where(part.chunk < 0, chunks, part.chunk)
            least = least.scatter_reduce(0, index, fraction, "amin")
    return least[:-1].view(teacher.ids.shape[0], max_chunks)


def _held_fraction(taken: TeacherSlice, inner: Inner, side: SideTable) -> Float[Tensor, " E"]:
    """Return the listed fraction of the mass of the tokens that begin with each node's path."""
    E = len(inner.node)
    first = side.member_start[inner.node].long()
    members = ragged(side.member_start[inner.node + 1] - first, first, E * side.most_members)
    owner = members.owner.clamp(max=E - 1)
    log_probs = pick(taken.logits, owner, side.member[members.source].long())
    unlisted = torch.isneginf(log_probs).to(log_probs.dtype)
    listed = ragged_sum(log_probs.exp(), members.owner, E)
    rest = ragged_sum(unlisted, members.owner, E) * taken.equal_part()
    return listed / (listed + rest).clamp(min=torch.finfo(listed.dtype).tiny)
