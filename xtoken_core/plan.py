"""Positions to windows to ranks to micro-batches: pure functions, so that teacher and student compute the same plan.

Step `s` of a run trains exactly the positions of its window. Their rows are divided into micro-batches, as few per rank
as the token budget allows, then dealt to the ranks in rounds: the i-th micro-batches of all ranks cost about the same,
and so do the ranks. Padded rows are sorted by length and cut into runs of neighbours, so that a micro-batch's rows have
similar lengths. Packed rows lie one after the other, so that their sum counts: each row, longest first, joins the
micro-batch with the fewest tokens so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from xtoken_core.errors import ConfigError


@dataclass(frozen=True)
class RowLengths:
    """A row of a window.

    Attributes:
        id: Its position.
        lengths: Its tokens on each side: the student's first, then each teacher's; 0 for one that does not compare it.
        teachers: Numbers of the teachers that compare it; None: all.
    """

    id: int
    lengths: tuple[int, ...]
    teachers: tuple[int, ...] | None = None

    @property
    def sides(self) -> tuple[bool, ...]:
        """For each side, True if it has the row."""
        own = self.teachers
        return tuple(own is None or side == 0 or side - 1 in own for side in range(len(self.lengths)))


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        ids: Their positions, ascending: the order of the samples in a batch.
        widths: Tokens per row of each side, padding included. 0 for a teacher that does not compare these samples.
            Zeros without rows.
        packed: All samples lie in one row, one after the other; otherwise each sample is a row.
    """

    ids: tuple[int, ...]
    widths: tuple[int, ...]
    packed: bool = False

    @property
    def rows(self) -> int:
        """Rows of a batch and of a teacher's slot."""
        return min(len(self.ids), 1) if self.packed else len(self.ids)

    @property
    def teachers(self) -> tuple[int, ...]:
        """Numbers of the teachers that compare its samples, all of them the same."""
        return tuple(number for number, width in enumerate(self.widths[1:]) if width)

    @property
    def padded_tokens(self) -> int:
        """Tokens of all sides, padding included."""
        return self.rows * sum(self.widths)


@dataclass(frozen=True)
class Plan:
    """The micro-batches of every rank: equally many for each, with empty ones at the end."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of every rank; 0 for an empty window."""
        return len(self.ranks[0])

    @property
    def padded_tokens(self) -> int:
        """Tokens of all micro-batches and sides, padding included."""
        return sum(batch.padded_tokens for own in self.ranks for batch in own)

    def filled_up(self, micro_batches: int, *, sides: int) -> Plan:
        """Return the plan with empty micro-batches appended to every rank, up to `micro_batches`."""
        filler = (_empty(sides),) * (micro_batches - self.micro_batches)
        return Plan(tuple(own + filler for own in self.ranks))


def window_positions(step: int, *, samples_per_step: int, positions: int, group: int = 0, groups: int = 1) -> range:
    """Return the positions that a node group owns of a step's window.

    Args:
        step: The optimiser step, from 0.
        samples_per_step: Positions of a window, over all groups.
        positions: Positions of the run; its last window is cut there, and windows beyond are empty.
        group: The node group, `0 .. groups - 1`.
        groups: Number of node groups.
    """
    if step < 0 or samples_per_step < 1 or not 0 <= group < groups:
        raise ValueError(f"no window {step} of {samples_per_step} positions for group {group} of {groups}")
    first = step * samples_per_step
    # Exact bounds for any numbers: groups' shares differ by one at most, and none is lost by rounding.
    start = first + group * samples_per_step // groups
    stop = first + (group + 1) * samples_per_step // groups
    return range(min(start, positions), min(stop, positions))


def plan(
    rows: Sequence[RowLengths],
    *,
    ranks: int,
    token_budget: int,
    pad_multiple: int = 8,
    max_widths: tuple[int, ...],
    packed: bool = False,
) -> Plan:
    """Divide a window's rows among ranks and micro-batches. The order of `rows` does not matter.

    Rows of other teachers are in other micro-batches, as few of each as the token budget allows.

    Args:
        rows: The rows that are to be trained, each with as many lengths as `max_widths` has.
        ranks: Number of ranks.
        token_budget: Maximum of tokens of a micro-batch on each side, padding included.
        pad_multiple: Every width is a multiple of it.
        max_widths: The width of each side at most: its context length rounded up to `pad_multiple`.
        packed: The samples of a micro-batch lie in one row without padding in between.

    Raises:
        ConfigError: If a single row is wider than the budget or than its side's `max_widths`.
        ValueError: If rows or sides are inconsistent.
    """
    if ranks < 1 or pad_multiple < 1 or any(width % pad_multiple for width in max_widths):
        raise ValueError(f"no plan for {ranks} ranks and widths up to {max_widths} in multiples of {pad_multiple}")
    # Queue and trainer must not count a sample twice: it would be in two micro-batches.
    if len({row.id for row in rows}) != len(rows):
        raise ValueError("a row is in the window twice")
    padded = [_padded(row, token_budget, pad_multiple, max_widths) for row in rows]
    batches: list[MicroBatch] = []
    # Teachers compare whole micro-batches, so that rows of other teachers are in others.
    for sides in sorted({row.sides for row in rows}):
        if packed:
            batches += _packed([row for row in rows if row.sides == sides], token_budget, pad_multiple, ranks)
            continue
        # Neighbours have similar lengths, so that a run of them wastes little; the id makes the order a total one.
        own = sorted((row for row in padded if row.sides == sides), key=_longest_first)
        # As few rounds as the budget allows, then all of their micro-batches as equal in cost as they can be.
        most = -(-len(_cut(own, token_budget, None)) // ranks) * ranks
        batches += _even_cut(own, token_budget, most)
    return Plan(_deal(batches, ranks, -(-len(batches) // ranks), len(max_widths)))


def _side_name(side: int, sides: int) -> str:
    if side == 0:
        return "the student's side"
    return "the teacher's side" if sides == 2 else f"the side of teacher {side - 1}"


def _padded(row: RowLengths, budget: int, multiple: int, max_widths: tuple[int, ...]) -> RowLengths:
    """Return the row with its lengths rounded up to widths."""
    if len(row.lengths) != len(max_widths):
        raise ValueError(f"sample {row.id} has {len(row.lengths)} lengths, the run {len(max_widths)} sides")
    widths = _widths(row.lengths, row.sides, multiple)
    for side, (length, width, most) in enumerate(zip(row.lengths, widths, max_widths, strict=True)):
        name = _side_name(side, len(widths))
        if width > most:
            raise ConfigError(
                f"sample {row.id} has {length} tokens on {name}, whose context length allows {most}: "
                "collators and trainer do not run the same settings"
            )
        if width > budget:
            raise ConfigError(
                f"sample {row.id} is {width} tokens wide on {name}, more than train.micro_batch_tokens = {budget}: "
                "raise it or lower the context_length"
            )
    return RowLengths(row.id, widths, row.teachers)


def _widths(lengths: Sequence[int], sides: Sequence[bool], multiple: int) -> tuple[int, ...]:
    """Return lengths rounded up to widths; at least one multiple on a side that has the rows."""
    return tuple(max(own, -(-length // multiple)) * multiple for length, own in zip(lengths, sides, strict=True))


def _longest_first(row: RowLengths) -> tuple[int, tuple[int, ...], int]:
    return -sum(row.lengths), row.lengths, row.id


def _packed(rows: Sequence[RowLengths], budget: int, multiple: int, ranks: int) -> list[MicroBatch]:
    """Divide rows into the fewest packed micro-batches, in rounds of `ranks`, that keep the budget."""
    if not rows:
        return []
    room = budget // multiple * multiple
    ordered = sorted(rows, key=_longest_first)
    totals = [sum(side) for side in zip(*(row.lengths for row in rows), strict=True)]
    # A lower bound: the longest side fills every bin to the brim.
    rounds = max(1, -(-max(totals) // (room * ranks)))
    while True:  # ends: as many micro-batches as rows hold a row each
        bins = _spread(ordered, rounds * ranks, room)
        if bins is not None:
            break
        rounds += 1
    batches = []
    for own in filter(None, bins):
        sums = [sum(side) for side in zip(*(row.lengths for row in own), strict=True)]
        widths = _widths(sums, own[0].sides, multiple)
        batches.append(MicroBatch(tuple(sorted(row.id for row in own)), widths, packed=True))
    return batches


def _spread(rows: Sequence[RowLengths], count: int, room: int) -> list[list[RowLengths]] | None:
    """Assign each row, longest first, to the emptiest of `count` bins that has room on every side; None if none has."""
    bins: list[list[RowLengths]] = [[] for _ in range(count)]
    used = [(0,) * len(rows[0].lengths)] * count
    by_load = [(0, number) for number in range(count)]
    for row in rows:
        full = []
        while by_load:
            load, number = heapq.heappop(by_load)
            grown = tuple(a + b for a, b in zip(used[number], row.lengths, strict=True))
            if max(grown) <= room:
                break
            # Back on the heap after this row: a shorter one may still fit.
            full.append((load, number))
        else:
            return None
        bins[number].append(row)
        used[number] = grown
        for entry in (*full, (sum(grown), number)):
            heapq.heappush(by_load, entry)
    return bins


def _cut(rows: Sequence[RowLengths], budget: int, cost_limit: int | None) -> list[MicroBatch]:
    """Cut sorted rows into the fewest runs of neighbours that keep the budget (and the cost, where one row can)."""
    batches: list[MicroBatch] = []
    ids: list[int] = []
    widths: tuple[int, ...] = ()
    for row in rows:
        grown = tuple(map(max, widths, row.lengths)) if ids else row.lengths
        count = len(ids) + 1
        over_cost = cost_limit is not None and count * sum(grown) > cost_limit
        if ids and (count * max(grown) > budget or over_cost):
            batches.append(MicroBatch(tuple(sorted(ids)), widths))
            ids, grown = [], row.lengths
        ids.append(row.id)
        widths = grown
    if ids:
        batches.append(MicroBatch(tuple(sorted(ids)), widths))
    return batches


def _even_cut(rows: Sequence[RowLengths], budget: int, most: int) -> list[MicroBatch]:
    """Cut into at most `most` micro-batches such that the costliest is cheapest, by bisection over its cost."""
    if not rows:
        return []
    # No micro-batch is cheaper than its largest row; none need be costlier than without a limit.
    low = max(sum(row.lengths) for row in rows)
    high = max(batch.padded_tokens for batch in _cut(rows, budget, None))
    while low < high:
        middle = (low + high) // 2
        if len(_cut(rows, budget, middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return _cut(rows, budget, high)


def _deal(batches: list[MicroBatch], ranks: int, rounds: int, sides: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Assign one micro-batch to every rank in each round, the costliest to the rank with the least load.

    So the loads of two ranks never differ by more than the costliest micro-batch.
    """
    # Costliest first, so that the ranks of one round have micro-batches of about one cost and wait little for each
    # other.
    ordered = sorted(batches, key=lambda batch: (-batch.padded_tokens, batch.ids))
    ordered += [_empty(sides)] * (rounds * ranks - len(ordered))
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for start in range(0, len(ordered), ranks):
        by_load = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, batch in zip(by_load, ordered[start : start + ranks], strict=True):
            dealt[rank].append(batch)
            loads[rank] += batch.padded_tokens
    return tuple(tuple(own) for own in dealt)


def _empty(sides: int) -> MicroBatch:
    return MicroBatch((), (0,) * sides)
