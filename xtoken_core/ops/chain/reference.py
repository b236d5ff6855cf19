"""The chain-rule divergence: every chunk's KL, as a sum over the decisions that its tokens make.

For tokens v of the student and w of the teacher, `spell` gives the other tokenizer's pieces of a token's bytes, and
`root` a class that both vocabularies share (see `xtoken_core.chain`).

- At the start of a chunk both sides begin a token: the KL of the two next-token distributions by root. Each side is
  conditioned on what the other knows: that it has just ended a token (its *live* tokens).
- Inside, one side has one token x and the other tokens y1..yn. After each of y1..yn, both sides decide what comes
  next: the other side by its next-token distribution, x's side by those of its tokens that begin with y1..yj; their
  classes are the root of the next piece, or "ends here". After yn, this is the *end term*; a chunk of one token on
  both sides has one in each direction if longer tokens share its path.

The sum is the KL of the chunk by the chain rule where both tokenizers' cuts are decided by the tokens so far.
The term of a node weighs 1 because the text, drawn from the source, visits it as often as the source does; on given
text this holds for the forward KL alone. Other forms, on text of the student's own, are in `divergences`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.chain.tables import ChainTables, SideTable
from xtoken_core.ops.chain.blocks import Block, summed
from xtoken_core.ops.chain.divergences import DENSE, Classes, Generated, node_divergence
from xtoken_core.ops.chain.events import Inner, SideTokens, Starts, find_events
from xtoken_core.ops.chain.live import live_mask
from xtoken_core.ops.chain.ragged import pick, ragged, ragged_softmax, ragged_sum
from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import Op, upcast

BLOCK_BYTES = 1 << 28
"""Memory limit of the rows of one block, both sides together."""


@dataclass(frozen=True)
class ChainOptions:
    """Options of the divergence: which terms it includes and whether start terms are conditioned.

    Attributes:
        conditioning: Start terms are conditioned on the other side's cut.
        end_terms: Include the terms after the last token of a chunk.
        bare_space: Include the terms at a node whose path is a single space. Whether that token ends is often decided
            by digits that come later, which the other side cannot know; a tokenizer that writes the space before a word
            alone decides the word there.
    """

    conditioning: bool = True
    end_terms: bool = True
    bare_space: bool = True


@dataclass(frozen=True)
class ChainSettings:
    """Settings of a call.

    Attributes:
        max_chunks: `P`.
        options: Terms to include.
        temperature: Divides both sides' logits.
        with_cross_entropy: True to return the student's cross-entropy on its whole head, too.
        generated: The form on text that the student has generated; None: all text is given.
        overwrite: True if a backend may overwrite the student's logits with their gradient.
    """

    max_chunks: int
    options: ChainOptions = ChainOptions()
    temperature: float = 1.0
    with_cross_entropy: bool = True
    generated: Generated | None = None
    overwrite: bool = False


class ChainResult(NamedTuple):
    """The divergence and the cross-entropy.

    Attributes:
        start: `[B, P]`, KL at the chunk's start, in nats.
        inner: `[B, P]`, that of the nodes inside its tokens.
        end: `[B, P]`, that of the node after its last token.
        losses: `[B, T_s]` cross-entropy in nats; None unless asked for.
        hits: `[B, T_s]`, True where the first guess is right; None unless asked for.
    """

    start: Tensor
    inner: Tensor
    end: Tensor
    losses: Tensor | None = None
    hits: Tensor | None = None


def chain(
    student_logits: Float[Tensor, "B T_s V_head"],
    teacher_logits: Float[Tensor, "B T_t V_m"],
    student: SideTokens,
    teacher: SideTokens,
    tables: ChainTables,
    settings: ChainSettings,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> ChainResult:
    """Compute the parts of every chunk's divergence, and `cross_entropy` on the student's whole head.

    Args:
        student_logits: The whole head; the divergence cuts it to the tables' tokens.
        teacher_logits: Likewise; no gradient.
        student: The student's tokens.
        teacher: The teacher's tokens.
        tables: Tables of the two tokenizers, on the logits' device.
        settings: Settings of the call.
        block_bytes: Memory limit of the rows that are computed together, in bytes.

    Returns:
        The parts in float32, or float64 for such logits.
    """
    whole_head = upcast(student_logits)  # once: the gradient has several parts, and is rounded once
    z_s = whole_head[..., : len(tables.student.root)]
    z_t = teacher_logits[..., : len(tables.teacher.root)].detach().flatten(0, 1)
    dtype = torch.promote_types(torch.promote_types(z_s.dtype, z_t.dtype), torch.float32)
    # Both sides' rows, and as much again for their sums by class; on a GPU every node takes the room of the largest.
    ragged_sizes = (
        8 * max(each.most_members + each.most_slots, each.live.most_rules) for each in (tables.student, tables.teacher)
    )
    width = z_s.shape[2] + z_t.shape[1] + 2 * tables.classes + (max(ragged_sizes) if z_s.is_cuda else 0)
    size = max(1, block_bytes // (8 * width))
    chunks = len(z_s) * settings.max_chunks
    blocks: list[Block] = []
    for events, term in find_terms((student, teacher), tables, settings):
        # A block's term sees the student's rows alone as its variable: `_Sum` differentiates by them block by block.
        def value(block: Any, rows: Tensor, term: Term = term) -> Tensor:
            T = settings.temperature
            return term(block, rows.to(dtype) / T, z_t[block.teacher_row].to(dtype) / T)

        # Of a size that follows from shapes alone, so that sums have the same order in every run.
        parts = [events.part(slice(at, at + size)) for at in range(0, len(events.chunk), size)]
        blocks += [Block(part, chunks, value) for part in parts]
    start, inner, end = summed(z_s, blocks, chunks, dtype).unbind()
    if not settings.with_cross_entropy:
        return ChainResult(start, inner, end)
    losses, hits = cross_entropy(whole_head, student.predicted)
    return ChainResult(start, inner, end, losses, hits)


class NativeChainOp(Op):
    """Reference backend: blocks of rows, computed again for the gradient."""

    reads_once = False
    """True if divergence and cross-entropy share one reading of the student's rows and one gradient."""

    forward = staticmethod(chain)

    def prepare(self, tables: ChainTables) -> None:
        """Derive from the tables what a call needs, so that no call waits for the device."""
        tables.read_sizes()


Term = Callable[[Any, Tensor, Tensor], Tensor]
"""Values `[E]` of `E` events from the student's logits `[E, V_s]` and the teacher's `[E, V_t]`."""


def find_terms(
    sides: tuple[SideTokens, SideTokens], tables: ChainTables, settings: ChainSettings
) -> Sequence[tuple[Starts | Inner, Term]]:
    """List the terms to compare: the starts, then the nodes inside the student's and inside the teacher's tokens."""
    options, generated = settings.options, settings.generated
    flags = {"end_terms": options.end_terms, "bare_space": options.bare_space}
    every = find_events(sides, settings.max_chunks, (tables.student, tables.teacher), **flags)
    starts, inside_student, inside_teacher = (events.without_padding() for events in every)

    def generated_rows(block: Starts | Inner) -> Generated | None:
        return None if generated is None else generated.of_rows(block.student_row)

    def at_start(block: Any, s: Tensor, t: Tensor) -> Tensor:
        return start_values(s, t, block, tables, options.conditioning, generated_rows(block))

    def in_student(block: Any, s: Tensor, t: Tensor) -> Tensor:
        return inner_values(s, t, block, tables.student, tables.teacher, tables.classes, True, generated_rows(block))

    def in_teacher(block: Any, s: Tensor, t: Tensor) -> Tensor:
        return inner_values(t, s, block, tables.teacher, tables.student, tables.classes, False, generated_rows(block))

    return (starts, at_start), (inside_student, in_student), (inside_teacher, in_teacher)


def start_values(
    student_logits: Float[Tensor, "E V_s"],
    teacher_logits: Float[Tensor, "E V_t"],
    starts: Starts,
    tables: ChainTables,
    conditioning: bool,
    generated: Generated | None = None,
) -> Float[Tensor, " E"]:
    """Compute the KL of the next-token distributions by root, each over the tokens that can follow the other's cut.

    Args:
        student_logits: The student's rows.
        teacher_logits: The teacher's rows.
        starts: The events.
        tables: Tables of the two tokenizers.
        conditioning: Leave out tokens that cannot follow the other side's cut.
        generated: The form on generated text.
    """
    C = tables.classes
    sums, reached = [], []
    sides = (
        (student_logits, tables.student, starts.student_token, starts.teacher_before),
        (teacher_logits, tables.teacher, starts.teacher_token, starts.student_before),
    )
    for logits, side, token, before in sides:
        root = side.root.long().expand(logits.shape)  # [E, V], the same row for every event
        live = torch.ones_like(logits, dtype=torch.bool)
        if conditioning:
            live = live_at_starts(live_mask(side.live, before), starts, token)
        probabilities = torch.softmax(logits.masked_fill(~live, -torch.inf), dim=1)  # [E, V]
        probabilities = torch.where(live, probabilities, 0.0)
        sums.append(probabilities.new_zeros(len(logits), C + 1).scatter_add(1, root, probabilities))
        # [E, C + 1], classes with a live token
        reached.append(torch.zeros_like(sums[-1]).scatter_add_(1, root, live.to(logits.dtype)) > 0)
    # Classes that one side cannot reach at this cut say nothing about the other side's choice.
    return restricted(sums[1], sums[0], reached[0] & reached[1], generated)


def live_at_starts(can_follow: Bool[Tensor, "E V"], starts: Starts, token: Int[Tensor, " E"]) -> Bool[Tensor, "E V"]:
    """Mark the tokens of one side that count at starts: all where the other side has not cut the text alike.

    Args:
        can_follow: From `live_mask`.
        starts: The events.
        token: The text's own token of this side.
    """
    live = can_follow | ~starts.at_cut.unsqueeze(1)
    return live.scatter_(1, token.unsqueeze(1), True)  # the text's own token can follow: it does


def inner_values(
    holder_logits: Float[Tensor, "E V_k"],
    other_logits: Float[Tensor, "E V_o"],
    inner: Inner,
    side: SideTable,
    other: SideTable,
    classes: int,
    holder_is_student: bool,
    generated: Generated | None = None,
) -> Float[Tensor, " E"]:
    """Compute the KL at nodes inside tokens of one side, the holder; the other side is at its fresh token.

    Args:
        holder_logits: Where the token begins.
        other_logits: After the last of its tokens that the node's path has.
        inner: The nodes.
        side: The holder's tables.
        other: The other side's.
        classes: Root classes.
        holder_is_student: Whether the holder is the side that learns.
        generated: The form on generated text.
    """
    E = len(inner.node)
    # [E, C + 2]: column C is of tokens without a root, the last one of `ends here`, which no token of this side is in.
    by_root = torch.softmax(other_logits, dim=1)
    by_root = by_root.new_zeros(E, classes + 2).scatter_add(1, other.root.long().expand(by_root.shape), by_root)

    def held(owner: Tensor, token: Tensor) -> Tensor:
        return pick(holder_logits, owner, token)

    most = E * side.most_slots, E * side.most_members
    return node_values(held, by_root, inner, side, most, holder_is_student, generated=generated)


def node_values(
    held_logits: Callable[[Tensor, Tensor], Tensor],
    by_root: Float[Tensor, "E C_plus_2"],
    inner: Inner,
    side: SideTable,
    most: tuple[int, int],
    holder_is_student: bool,
    tail: Float[Tensor, " E"] | None = None,
    generated: Generated | None = None,
) -> Float[Tensor, " E"]:
    """Compute `inner_values` from what the two sides have at each node.

    Args:
        held_logits: Returns the holder's logits of tokens from the events and their ids.
        by_root: The other side's mass by class; the last column stands for "ends here" and is empty.
        inner: The nodes.
        side: The holder's tables.
        most: Upper bounds of the slots and of the members of all nodes.
        holder_is_student: As for `inner_values`.
        tail: Mass of the other side's tokens that are not listed, which is in no class. It is compared with "ends here"
            and the classes of which no token is listed.
        generated: As for `inner_values`.
    """
    E, to, width = len(inner.node), torch.int64, by_root.shape[1]
    first_slot, first_member = side.slot_start[inner.node].to(to), side.member_start[inner.node].to(to)
    slots = ragged(side.slot_start[inner.node + 1] - first_slot, first_slot, most[0])
    members = ragged(side.member_start[inner.node + 1] - first_member, first_member, most[1])
    # Padding reads what the last event has; its weights and those of its slots are 0.
    event, owner = (each.owner.clamp(max=E - 1) for each in (slots, members))
    of_slot = torch.where(members.owner < E, side.member_slot[members.source].to(to) - first_slot[owner], 0)
    chosen = held_logits(owner, side.member[members.source].to(to))  # [members of all events]
    weights = ragged_softmax(chosen, members.owner, E)
    # The holder's probability of each slot, renormalised over the node's tokens: it has begun one of them.
    held = chosen.new_zeros(len(event)).scatter_add(0, slots.begin[owner] + of_slot, weights)
    cls = side.slot_class[slots.source].to(to)
    ends = cls < 0
    # What no slot names: the fresh side may begin any other token, which ends the holder's here.
    named = torch.zeros(E + 1, width, dtype=torch.bool, device=cls.device)
    named.view(-1).index_fill_(0, slots.owner * width + torch.where(ends, width - 1, cls), True)
    rest = by_root.masked_fill(named[:E], 0.0).sum(1)
    in_class = pick(by_root, event, cls.clamp(min=0))
    fresh = torch.where(ends, rest.gather(0, event), in_class).masked_fill(slots.owner == E, 0.0)
    group = slots.owner
    if tail is not None:
        # Slots that may hold tokens of the tail are taken together as one more slot per event.
        open_ = (ends | (fresh == 0)) & (group < E)
        together = [ragged_sum(torch.where(open_, each, 0.0), group, E) for each in (fresh, held)]
        some = ragged_sum(open_.to(tail.dtype), group, E) > 0
        fresh = torch.cat([torch.where(open_, 0.0, fresh), together[0] + torch.where(some, tail, 0.0)])
        held = torch.cat([torch.where(open_, 0.0, held), together[1]])
        group = torch.cat([group, torch.arange(E, device=group.device)])
    # p is the teacher's and q the student's, whichever holds the node.
    p, q = (fresh, held) if holder_is_student else (held, fresh)

    def spread(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_ones(1)])[group]

    return node_divergence(p, q, Classes(lambda x: ragged_sum(x, group, E), spread), generated)


def restricted(
    p: Float[Tensor, "E C"], q: Float[Tensor, "E C"], alive: Bool[Tensor, "E C"], generated: Generated | None
) -> Float[Tensor, " E"]:
    """Compute the divergence over the classes that both sides can have.

    A class that no token of the student can be in is beyond any gradient; its infinite term would hide the others.
    """
    p = torch.where(alive, p, 0.0)
    return node_divergence(p, q if generated is None else torch.where(alive, q, 0.0), DENSE, generated)
