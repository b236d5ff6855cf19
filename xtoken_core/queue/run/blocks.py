"""The source: blocks of positions that collators lease. Back-pressure is in this lease."""

from __future__ import annotations

from dataclasses import dataclass

from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.wire import QueueError


@dataclass(slots=True)
class BlockLease:
    """A block of positions that a collator works on."""

    id: int
    session: str
    block: int


class Blocks:
    """Which blocks are put, leased or free.

    Args:
        positions: Positions of the run.
        block_size: Positions of a block.
        span: How far ahead of the lowest position not done blocks are leased.
        share: Which blocks of every `of` are leased here; with several node groups the others are other queues'.
        of: Blocks of a step.

    Attributes:
        done: Blocks of which every position has its row or tombstone.
        leases: Blocks being worked on, by lease id.
        refused: How often a block was given back as impossible.
    """

    def __init__(
        self, positions: int, block_size: int, span: int, *, share: range = range(1), of: int = 1
    ) -> None:  # fmt: skip
        self.positions = positions
        self.share, self.of = share, of
        self.block_size = block_size
        self.span = span
        self.done = IntervalSet()
        self.leases: dict[int, BlockLease] = {}
        self.refused: dict[int, int] = {}

    def bounds(self, block: int) -> tuple[int, int]:
        """First and last (exclusive) position of a block."""
        return block * self.block_size, min((block + 1) * self.block_size, self.positions)

    def lowest_free(self, floor: int) -> int | None:
        """The lowest free block that ends inside `[floor, floor + span)`; `floor` is the lowest position not done."""
        leased = {lease.block for lease in self.leases.values()}
        block = self.done.first_gap(floor // self.block_size)
        while self.bounds(block)[0] < self.positions and self.bounds(block)[1] <= floor + self.span:
            if block % self.of in self.share and block not in leased:
                return block
            block = self.done.first_gap(block + 1)
        return None

    def all_done(self) -> bool:
        """Whether every block is put."""
        return self.bounds(self.done.first_gap())[0] >= self.positions

    def passed(self, position: int) -> None:
        """Every block below a position, a step's boundary, is done."""
        self.done.add(0, position // self.block_size)

    def lease(self, lease_id: int, session: str, block: int) -> BlockLease:
        """Give a free block to a session."""
        self.leases[lease_id] = BlockLease(lease_id, session, block)
        return self.leases[lease_id]

    def held(self, lease_id: int, session: str) -> BlockLease:
        """A lease that stands.

        Raises:
            QueueError: `lease_revoked`.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.session != session:
            raise QueueError("lease_revoked", f"block lease {lease_id} is not held any more")
        return lease

    def end_session(self, session: str) -> None:
        """Its blocks are free again."""
        for lease in [lease for lease in self.leases.values() if lease.session == session]:
            del self.leases[lease.id]

    def restart(self, start: int, filled: IntervalSet) -> None:
        """Every block from position `start` on is free again, unless all its positions are in `filled`."""
        self.leases.clear()
        self.done = IntervalSet()
        self.done.add(0, start // self.block_size)
        block = start // self.block_size
        highest = max((stop for _, stop in filled.intervals()), default=start)
        while self.bounds(block)[0] < min(highest, self.positions):
            first, last = self.bounds(block)
            if filled.first_gap(first) >= last:
                self.done.add(block)
            block += 1
