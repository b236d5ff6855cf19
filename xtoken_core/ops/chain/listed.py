"""The chain-rule divergence from a teacher's largest probabilities, in time and memory of what they list.

The terms are those of `reference`; no row is as wide as the teacher's vocabulary. The teacher's side of a comparison
has an entry per listed token, or per class of these, and one for the tail. Sizes of groups are read by the host, so
that on a GPU no group has the room of the largest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.chain.tables import ChainTables, SideTable
from xtoken_core.ops.chain.blocks import Block, summed
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.events import Events, Inner, SideTokens, Starts, find_events
from xtoken_core.ops.chain.live import live_among, live_mask, rule_counts
from xtoken_core.ops.chain.ragged import pick, ragged, ragged_sum
from xtoken_core.ops.chain.reference import ChainOptions, live_at_starts, node_values, restricted
from xtoken_core.ops.numerics import floored_log

Some = TypeVar("Some", bound=Events)

BLOCK_BYTES = 1 << 30
"""Memory limit of the rows of one block."""
MEMBER_BYTES = 64
"""Memory for an entry of a group of a varying size, a token that begins with a node's path: ids, owners, values."""


@dataclass(frozen=True)
class TopKTeacher:
    """The largest probabilities of every row; the rest of its mass, the tail, belongs to tokens that are not listed.

    Attributes:
        ids: `[B, T_t, k]` int64, distinct within a row; -1, or `V_t` and more: an empty entry.
        log_probs: `[B, T_t, k]` log-probabilities at the loss's temperature.
        vocab_size: `V_t`.
        tail: `[B, T_t]` mass of the tokens that are not listed; None: what the listed ones lack.
        spread: True to give each unlisted token an equal part of the tail where the teacher's own token is inside a
            node; False to compare the listed ones alone there.
    """

    ids: Int[Tensor, "B T_t k"]
    log_probs: Float[Tensor, "B T_t k"]
    vocab_size: int
    tail: Float[Tensor, "B T_t"] | None = None
    spread: bool = True


class ListedParts(NamedTuple):
    """Results of `listed_parts`.

    Attributes:
        parts: `[3, B, P]`, the parts of every chunk's divergence (`PARTS`), with a gradient for the student.
        kept: `[B, P]`, the least fraction of the teacher's probability that its listed tokens have at the nodes of each
            chunk; 1 for a chunk without nodes.
    """

    parts: Float[Tensor, "3 B P"]
    kept: Float[Tensor, "B P"]


@dataclass(frozen=True)
class ListedRows:
    """A teacher's listed tokens by row, in ascending order of their ids.

    Attributes:
        ids: `[E, k]` int64; `width` in an empty entry.
        log_probs: `[E, k]`; -inf in an empty entry.
        tail: `[E]` mass of the tokens that are not listed.
        width: `V_t`.
        spread: As in `TopKTeacher`.
    """

    ids: Int[Tensor, "E k"]
    log_probs: Float[Tensor, "E k"]
    tail: Float[Tensor, " E"]
    width: int
    spread: bool

    @classmethod
    def of(cls, teacher: TopKTeacher, dtype: torch.dtype) -> ListedRows:
        """Return the rows of all positions `[B * T_t]`, with values in `dtype`."""
        listed = (teacher.ids >= 0) & (teacher.ids < teacher.vocab_size)
        ids, order = torch.where(listed, teacher.ids, teacher.vocab_size).flatten(0, 1).sort(1)
        values = teacher.log_probs.detach().masked_fill(~listed, -torch.inf).flatten(0, 1).to(dtype)
        tail = (1 - values.exp().sum(1)).clamp(min=0.0) if teacher.tail is None else teacher.tail.flatten().to(dtype)
        return cls(ids, values.gather(1, order), tail, teacher.vocab_size, teacher.spread)

    def at(self, rows: Int[Tensor, " E"]) -> ListedRows:
        """Select rows by index."""
        return ListedRows(self.ids[rows], self.log_probs[rows], self.tail[rows], self.width, self.spread)

    @property
    def listed(self) -> Bool[Tensor, "E k"]:
        """False for empty entries."""
        return self.ids < self.width

    def equal_part(self) -> Float[Tensor, " E"]:
        """Return each unlisted token's equal part of the tail."""
        return self.tail / (self.width - self.listed.sum(1)).clamp(min=1)

    def look_up(self, row: Int[Tensor, " n"], token: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the log-probabilities of tokens; -inf of one that is not listed."""
        # One search in all rows at once: row r's ids are shifted by r strides, so that the keys ascend throughout.
        stride = self.width + 1
        keys = (self.ids + stride * torch.arange(len(self.ids), device=row.device).unsqueeze(1)).flatten()
        wanted = row * stride + token
        at = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        return torch.where(keys[at] == wanted, self.log_probs.flatten()[at], -torch.inf)

    def held(self, row: Int[Tensor, " n"], token: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the logits of tokens as they are compared inside a node of the teacher's own token."""
        log_probs = self.look_up(row, token)
        if not self.spread:
            return log_probs
        return torch.where(torch.isneginf(log_probs), floored_log(self.equal_part())[row], log_probs)

    def by_root(self, side: SideTable, classes: int) -> Float[Tensor, "E C_plus_2"]:
        """Return the listed tokens' mass by class; the last column is empty."""
        root = side.root.long()[self.ids.clamp(max=self.width - 1)]
        masses = self.log_probs.exp()
        return masses.new_zeros(len(root), classes + 2).scatter_add(1, root, masses)


@dataclass(frozen=True)
class LiveMasks:
    """Tokens of one side that can follow tokens of the other, computed once for each of these.

    Attributes:
        masks: `[U, V]`, a row for each different token.
        row: `[E]` int64, the row of each event.
    """

    masks: Bool[Tensor, "U V"]
    row: Int[Tensor, " E"]

    @classmethod
    def of(cls, side: SideTable, before: Int[Tensor, " E"], block_bytes: int) -> LiveMasks:
        """Return the masks of some events.

        Args:
            side: The side whose tokens follow.
            before: The other side's last tokens.
            block_bytes: Memory limit of the rows that are computed together, in bytes.
        """
        different, row = torch.unique(before, return_inverse=True)
        counts = rule_counts(side.live, different)
        masks, begin = [], 0
        for length, (most,) in _lengths([counts], 8 * side.live.width, block_bytes):
            masks.append(live_mask(side.live, different[begin : begin + length], most))
            begin += length
        return cls(torch.cat(masks) if masks else row.new_zeros(0, len(side.root), dtype=torch.bool), row)

    def part(self, which: slice) -> LiveMasks:
        """Select the masks of some events."""
        return LiveMasks(self.masks, self.row[which])

    def rows(self) -> Bool[Tensor, "E V"]:
        """Return a row for every event, as a copy."""
        return self.masks[self.row]


def listed_parts(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher: TopKTeacher,
    sides: tuple[SideTokens, SideTokens],
    max_chunks: int,
    tables: ChainTables,
    options: ChainOptions,
    *,
    temperature: float = 1.0,
    generated: Generated | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> ListedParts:
    """Compute the parts of every chunk's divergence, and the mass that is kept.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher: The teacher's largest probabilities; no gradient.
        sides: The student's and the teacher's tokens.
        max_chunks: `P`.
        tables: Tables of the two tokenizers, on the logits' device.
        options: Terms to include.
        temperature: Divides the student's logits.
        generated: The form on text that the student has generated; None: all text is given.
        block_bytes: Memory limit of the rows that are computed together, in bytes.

    Returns:
        float32, or float64 for such logits.
    """
    dtype = torch.promote_types(torch.promote_types(student_logits.dtype, teacher.log_probs.dtype), torch.float32)
    call = _Call(ListedRows.of(teacher, dtype), tables, options, temperature, generated)
    flags = {"end_terms": options.end_terms, "bare_space": options.bare_space}
    events = find_events(sides, max_chunks, (tables.student, tables.teacher), **flags)
    starts, in_student, in_teacher = events[0].compact(), events[1].compact(), events[2].compact()
    chunks = student_logits.shape[0] * max_chunks
    least = torch.ones(chunks, dtype=dtype, device=student_logits.device)
    width = student_logits.shape[2] + 2 * tables.classes
    blocks: list[Block] = []
    # Sizes are read by the host here, so that no group of a block has the room of the largest one.
    live = LiveMasks.of(tables.student, starts.teacher_before, block_bytes) if options.conditioning else None
    rules = rule_counts(tables.teacher.live, starts.student_before)
    begin = 0
    for some, (most_rules,) in _divided(starts, [rules], 8 * width, block_bytes):
        which = slice(begin, begin + len(some.chunk))
        begin = which.stop
        blocks.append(Block(some, chunks, call.start_term(live.part(which) if live is not None else None, most_rules)))
    for nodes, side in ((in_student, tables.student), (in_teacher, tables.teacher)):
        sizes = [each[nodes.node + 1] - each[nodes.node] for each in (side.slot_start, side.member_start)]
        for part, (slots, members) in _divided(nodes, sizes, 8 * width, block_bytes):
            blocks.append(Block(part, chunks, call.node_term(side, (slots, members))))
            least = least.scatter_reduce(0, part.chunk, call.kept(part, side, members), "amin")
    parts = summed(student_logits, blocks, chunks, dtype)
    return ListedParts(parts, least.view(student_logits.shape[0], max_chunks))


@dataclass(frozen=True)
class _Call:
    """State that all blocks of a call have in common."""

    rows: ListedRows
    tables: ChainTables
    options: ChainOptions
    temperature: float
    generated: Generated | None

    def form(self, events: Events) -> Generated | None:
        return None if self.generated is None else self.generated.of_rows(events.student_row)

    def student(self, logits: Tensor) -> Tensor:
        return logits.to(self.rows.tail.dtype) / self.temperature

    def start_term(self, live: LiveMasks | None, most: int) -> Callable[[Starts, Tensor], Tensor]:
        def values(starts: Starts, logits: Tensor) -> Tensor:
            given, form = self.rows.at(starts.teacher_row), self.form(starts)
            return start_values(self.student(logits), given, starts, self.tables, live, most, form)

        return values

    def node_term(self, side: SideTable, most: tuple[int, int]) -> Callable[[Inner, Tensor], Tensor]:
        C = self.tables.classes

        def in_student(inner: Inner, logits: Tensor) -> Tensor:
            given, student = self.rows.at(inner.teacher_row), self.student(logits)
            of_teacher = given.by_root(self.tables.teacher, C)
            form = self.form(inner)
            return node_values(partial(pick, student), of_teacher, inner, side, most, True, given.tail, form)

        def in_teacher(inner: Inner, logits: Tensor) -> Tensor:
            given, q = self.rows.at(inner.teacher_row), torch.softmax(self.student(logits), dim=1)
            root = self.tables.student.root.long().expand(q.shape)
            of_student = q.new_zeros(len(q), C + 2).scatter_add(1, root, q)
            return node_values(given.held, of_student, inner, side, most, False, generated=self.form(inner))

        return in_student if side is self.tables.student else in_teacher

    @torch.no_grad()
    def kept(self, inner: Inner, side: SideTable, most: int) -> Float[Tensor, " E"]:
        """Return the listed fraction of the teacher's mass at nodes.

        Inside the student's token it is the mass of all listed tokens. Inside the teacher's it is that of the listed
        tokens among those that begin with the node's path, if an unlisted token has an equal part of the tail.
        """
        given, E = self.rows.at(inner.teacher_row), len(inner.node)
        if side is self.tables.student:
            return 1 - given.tail
        first = side.member_start[inner.node].long()
        members = ragged(side.member_start[inner.node + 1] - first, first, most)
        log_probs = given.look_up(members.owner, side.member[members.source].long())
        unlisted = torch.isneginf(log_probs).to(log_probs.dtype)
        listed = ragged_sum(log_probs.exp(), members.owner, E)
        rest = ragged_sum(unlisted, members.owner, E) * given.equal_part()
        return listed / (listed + rest).clamp(min=torch.finfo(listed.dtype).tiny)


def start_values(
    student_logits: Float[Tensor, "E V_s"],
    given: ListedRows,
    starts: Starts,
    tables: ChainTables,
    live_masks: LiveMasks | None,
    most: int,
    generated: Generated | None = None,
) -> Float[Tensor, " E"]:
    """Compute the KL of the next-token distributions by root, each over the tokens that can follow the other's cut.

    Args:
        student_logits: The student's rows.
        given: The teacher's.
        starts: The events.
        tables: Tables of the two tokenizers.
        live_masks: The student's tokens that can follow the teacher's cut; None: all tokens of both sides count.
        most: Upper bound of the rules of the teacher's live sets.
        generated: The form on generated text.
    """
    C, side = tables.classes, tables.student
    # The student's mass by class, all of them; the last column is empty and stands for an empty entry.
    live = torch.ones_like(student_logits, dtype=torch.bool)
    if live_masks is not None:
        live = live_at_starts(live_masks.rows(), starts, starts.student_token)
    root = side.root.long().expand(live.shape)
    masses = torch.where(live, torch.softmax(student_logits.masked_fill(~live, -torch.inf), dim=1), 0.0)
    sums = masses.new_zeros(len(live), C + 2).scatter_add(1, root, masses)
    reached = torch.zeros(sums.shape, dtype=torch.bool, device=live.device)
    reached.scatter_(1, torch.where(live, root, C + 1), True)[:, C + 1] = False
    classes, p = _by_class(given, starts, tables, live_masks is not None, most)
    # The tail is compared with the classes of which no token is listed.
    both = reached.gather(1, classes)
    beyond = reached.sum(1) > both.sum(1)
    # The student's mass of the classes without a listed token: one more class, beside the teacher's tail.
    rest = sums.scatter(1, classes, 0.0).sum(1, keepdim=True)
    q = torch.cat([sums.gather(1, classes), rest], 1)
    p = torch.cat([p, (1 - p.sum(1, keepdim=True)).clamp(min=0.0)], 1)
    return restricted(p, q, torch.cat([both, beyond.unsqueeze(1)], 1), generated)


def _by_class(
    given: ListedRows, starts: Starts, tables: ChainTables, conditioning: bool, most: int
) -> tuple[Int[Tensor, "E k"], Float[Tensor, "E k"]]:
    """Return the classes of the listed tokens that can follow, each once, and the teacher's mass of each.

    The tail is taken to be able to follow. An empty entry has the number of classes plus 1, and no mass.
    """
    side, C = tables.teacher, tables.classes
    live, tokens = given.listed, given.ids.clamp(max=given.width - 1)
    if conditioning:
        can_follow = live_among(side.live, starts.student_before, tokens, most) | ~starts.at_cut.unsqueeze(1)
        # The text's own token can follow: it does.
        live = live & (can_follow | (given.ids == starts.teacher_token.unsqueeze(1)))
    masses = torch.where(live, given.log_probs.exp(), 0.0)
    total = (masses.sum(1) + given.tail).clamp(min=torch.finfo(masses.dtype).tiny)
    classes, order = torch.where(live, side.root.long()[tokens], C + 1).sort(1)
    masses = (masses / total.unsqueeze(1)).gather(1, order)
    begins = torch.ones_like(live)  # the first entry of each class
    begins[:, 1:] = classes[:, 1:] != classes[:, :-1]
    entry = begins.cumsum(1) - 1  # [E, k], the class's place among the row's classes
    return torch.full_like(classes, C + 1).scatter(1, entry, classes), torch.zeros_like(masses).scatter_add(
        1, entry, masses
    )


def _divided(events: Some, sizes: Sequence[Tensor], row_bytes: int, limit: int) -> Iterator[tuple[Some, list[int]]]:
    """Yield the events in blocks within a limit of memory, and of each the sum of every size; see `_lengths`."""
    begin = 0
    for length, sums in _lengths(sizes, row_bytes, limit):
        yield events.part(slice(begin, begin + length)), sums
        begin += length


def _lengths(sizes: Sequence[Tensor], row_bytes: int, limit: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the numbers of events of blocks within a limit of memory, and of each block the sum of every size.

    Args:
        sizes: Entries of groups that each event has, `[E]` for every kind of group.
        row_bytes: Memory of an event beside that of its sizes.
        limit: Bytes of a block.
    """
    counts = torch.stack([size.long() for size in sizes]).cpu()  # [sizes, E]
    block = (counts.sum(0) * MEMBER_BYTES + row_bytes).cumsum(0) // limit  # [E], a number per event, ascending
    _, lengths = torch.unique_consecutive(block, return_counts=True)
    begin = 0
    for length in lengths.tolist():
        yield length, counts[:, begin : begin + length].sum(1).tolist()
        begin += length
