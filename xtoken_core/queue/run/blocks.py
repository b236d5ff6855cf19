"""Blocks of positions that collators lease. Back-pressure is in this lease, not in the put."""

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
    """State of every block of a run: free, leased or done.

    Args:
        positions: Positions of the run.
        block_size: Positions per block.
        span: How far ahead of the lowest position not done blocks are leased, in positions.
        own: Blocks of each step that this queue's node group leases; the others belong to other groups' queues.
        per_step: Blocks per step.
        prompts: Blocks of prompts, the last ones of each step.

    Attributes:
        done: Blocks of which every position has its row or tombstone.
        leases: Blocks being worked on, by lease id.
        refused: Refusals per block that is not done.
    """

    def __init__(
        self, positions: int, block_size: int, span: int, *, own: range = range(1), per_step: int = 1, prompts: int = 0
    ) -> None:
        self.positions = positions
        self.own, self.per_step, self.prompts = own, per_step, prompts
        self.block_size = block_size
        self.span = span
        self.done = IntervalSet()
        self.leases: dict[int, BlockLease] = {}
        self.refused: dict[int, int] = {}

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the first and last (exclusive) position of a block."""
        return block * self.block_size, min((block + 1) * self.block_size, self.positions)

    def holds_prompts(self, block: int) -> bool:
        """Return True for a block of prompts."""
        return block % self.per_step >= self.per_step - self.prompts

    def is_done(self, position: int) -> bool:
        """Return whether the block of a position is done."""
        return position // self.block_size in self.done

    def lowest_free(self, floor: int, limit: int | None = None) -> int | None:
        """Return the lowest free block of text that ends inside `[floor, floor + span)`.

        Args:
            floor: Lowest position not done.
            limit: For a block of prompts: the position at which it ends at most; None: a block of text.
        """
        stop = floor + self.span if limit is None else min(floor + self.span, limit)
        leased = {lease.block for lease in self.leases.values()}
        block = self.done.first_gap(floor // self.block_size)
        # Blocks end inside the span too, since the span bounds the rows that the queue holds.
        while self.bounds(block)[0] < self.positions and self.bounds(block)[1] <= stop:
            wanted = self.holds_prompts(block) == (limit is not None)
            if wanted and block % self.per_step in self.own and block not in leased:
                return block
            block = self.done.first_gap(block + 1)
        return None

    def finish(self, block: int) -> None:
        """Mark a block as done; its refusals are forgotten."""
        self.done.add(block)
        self.refused.pop(block, None)

    def finish_below(self, position: int) -> None:
        """Mark every block below a position, a step's boundary, as done, and revoke the leases of those."""
        self.done.add(0, position // self.block_size)
        # Its collator may still work on one: that put is refused as revoked.
        self.leases = {number: lease for number, lease in self.leases.items() if lease.block not in self.done}
        self._forget_refusals()

    def lease(self, lease_id: int, session: str, block: int) -> BlockLease:
        """Lease a free block to a session."""
        self.leases[lease_id] = BlockLease(lease_id, session, block)
        return self.leases[lease_id]

    def held(self, lease_id: int, session: str) -> BlockLease:
        """Return a current lease of the session.

        Raises:
            QueueError: `lease_revoked`.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.session != session:
            raise QueueError("lease_revoked", f"block lease {lease_id} was revoked")
        return lease

    def count_refusals(self, block: int, times: int) -> int:
        """Count refusals of a block; return how many it has."""
        self.refused[block] = self.refused.get(block, 0) + times
        return self.refused[block]

    def end_session(self, session: str) -> None:
        """Free the blocks of an ended session."""
        for lease in [lease for lease in self.leases.values() if lease.session == session]:
            del self.leases[lease.id]

    def restart(self, start: int, filled: IntervalSet) -> None:
        """Free every block from position `start` on unless all its positions are in `filled`; blocks below are done."""
        self.leases.clear()
        self.done = IntervalSet()
        self.done.add(0, start // self.block_size)
        block = start // self.block_size
        # Beyond the last filled position every block is free, so the search ends there and not at the run's end.
        highest = max((stop for _, stop in filled.intervals()), default=start)
        while self.bounds(block)[0] < min(highest, self.positions):
            first, last = self.bounds(block)
            if filled.first_gap(first) >= last:
                self.done.add(block)
            block += 1
        self._forget_refusals()

    def _forget_refusals(self) -> None:
        self.refused = {block: times for block, times in self.refused.items() if block not in self.done}
