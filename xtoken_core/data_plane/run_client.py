"""Client of a training run's queue: the calls of collators, teachers and trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xtoken_core.data_plane.queue_client import QueueClient
from xtoken_core.wire import Column, pack_columns, unpack_columns
from xtoken_core.wire import messages as m


@dataclass(frozen=True)
class StepRows:
    """Rows of a step.

    Attributes:
        ids: Positions that have a row, dead ones included.
        skipped: Positions without a row.
        dead: Positions that died.
        columns: Columns of the rows, in the order of `ids`.
    """

    ids: list[int]
    skipped: list[int]
    dead: list[int]
    columns: dict[str, Column]


class RunClient:
    """Calls of a run's workers, over a `QueueClient` with a session.

    Waiting calls return None if nothing came in `wait_s`. Beyond `QueueClient`'s errors they raise QueueError with
    the codes `rewound` (start again at `detail["step"]`), `ring_closed`, `lease_revoked`, `exhausted` and `run_failed`,
    and `AlreadyDone` where there is nothing left to do.
    """

    def __init__(self, client: QueueClient, partition: str | None = None) -> None:
        self.client = client
        self.partition = partition or client.partition

    # Collators and rollout workers

    def lease_block(self, *, wait_s: float) -> m.Block | None:
        """Lease the lowest free block of positions: of text for a collator, of prompts for a rollout worker."""
        reply = self.client.wait(lambda s: m.LeaseBlock(**self._head(), wait_s=s), m.Block, wait_s)
        return reply[0] if reply else None

    def put_block(
        self, lease: int, ids: Sequence[int], columns: Mapping[str, Column], tombstones: Mapping[int, str]
    ) -> None:
        """Finish a block with a row or a tombstone for every position."""
        heads, buffers = pack_columns(dict(columns))
        request = m.Put(**self._head(), ids=list(ids), columns=heads, lease=lease, tombstones=dict(tombstones))
        self.client.ask(request, m.Stored, buffers)

    def nack(self, lease: int, ids: Sequence[int], reason: str) -> None:
        """Refuse a block, or samples of a micro-batch."""
        self.client.ask(m.Nack(**self._head(), lease=lease, ids=list(ids), reason=reason[:4096]), m.Ok)

    # Teachers

    def await_trainer(self, rank: int, *, wait_s: float) -> m.Trainer | None:
        """Return the trainer of a rank, once a rewind has admitted it."""
        reply = self.client.wait(lambda s: m.AwaitTrainer(**self._head(), rank=rank, wait_s=s), m.Trainer, wait_s)
        return reply[0] if reply else None

    def announce_ring(self, teacher: int, rank: int, trainer: str, handle: bytes) -> int:
        """Offer a ring to a trainer session; return its number."""
        request = m.AnnounceRing(**self._head(), teacher=teacher, rank=rank, trainer=trainer, handle=handle)
        return self.client.ask(request, m.Ring)[0].ring

    def await_opened(self, ring: int, *, wait_s: float) -> bool:
        """Return whether the trainer has opened the ring by now."""
        reply = self.client.wait(lambda s: m.AwaitOpened(**self._head(), ring=ring, wait_s=s), m.Ok, wait_s)
        return reply is not None

    def claim_slot(
        self, ring: int, ids: Sequence[int], fields: Sequence[str], *, rewinds: int, wait_s: float
    ) -> tuple[m.Claimed, dict[str, Column]] | None:
        """Lease the next micro-batch together with a free slot, and read its fields."""
        return self.client.wait_for_claim(
            lambda s: m.ClaimSlot(
                **self._head(), ring=ring, ids=list(ids), fields=list(fields), rewinds=rewinds, wait_s=s
            ),
            wait_s,
        )

    def complete(self, lease: int, columns: Mapping[str, Column] | None = None) -> None:
        """Mark the slot of a lease as full.

        Args:
            lease: The lease.
            columns: The signal, where it travels through the queue.
        """
        heads, buffers = pack_columns(dict(columns or {}))
        self.client.ask(m.Complete(**self._head(), lease=lease, columns=heads), m.Ok, buffers)

    # Teachers and trainers

    def window(self, step: int, fields: Sequence[str], *, rewinds: int, wait_s: float) -> StepRows | None:
        """Read the rows of a step, once every position has its row or tombstone."""
        reply = self.client.wait(
            lambda s: m.Window(**self._head(), step=step, fields=list(fields), rewinds=rewinds, wait_s=s),
            m.WindowRows,
            wait_s,
        )
        if reply is None:
            return None
        rows, buffers = reply
        return StepRows(rows.ids, rows.skipped, rows.dead, unpack_columns(rows.columns, buffers))

    # Trainers

    def rewind(self, step: int, skipped: Mapping[int, str], dead: Mapping[int, str]) -> int:
        """Start, or start again, at a step; return the number of rewinds, which later calls name."""
        request = m.Rewind(**self._head(), step=step, skipped=dict(skipped), dead=dict(dead))
        return self.client.ask(request, m.Rewound)[0].rewinds

    def await_ring(self, teacher: int, *, wait_s: float) -> m.Ring | None:
        """Return the ring of one of the rank's teachers."""
        reply = self.client.wait(lambda s: m.AwaitRing(**self._head(), teacher=teacher, wait_s=s), m.Ring, wait_s)
        return reply[0] if reply else None

    def confirm_ring(self, teacher: int, ring: int) -> None:
        """Report that the ring is open and its canary was read."""
        self.client.ask(m.OpenedRing(**self._head(), teacher=teacher, ring=ring), m.Ok)

    def claim_batch(
        self, ids: Sequence[int], fields: Sequence[str], *, rewinds: int, wait_s: float
    ) -> tuple[m.Claimed, dict[str, Column]] | None:
        """Lease a micro-batch once every teacher's signal is there, and read its fields.

        The lease's `slots` say which slot holds each teacher's signal; row `i` of a slot belongs to `ids[i]`. The
        columns of a signal that travels through the queue come with it.
        """
        return self.client.wait_for_claim(
            lambda s: m.ClaimBatch(**self._head(), ids=list(ids), fields=list(fields), rewinds=rewinds, wait_s=s),
            wait_s,
        )

    def release(self, ring: int, slot: int, generation: int) -> None:
        """Free a slot after the backward that read it has completed."""
        self.client.ask(m.Release(**self._head(), ring=ring, slot=slot, generation=generation), m.Ok)

    def check_step(self, step: int, dead: Sequence[int], *, rewinds: int) -> bool:
        """Return whether the step must be repeated."""
        request = m.CheckStep(**self._head(), step=step, rewinds=rewinds, dead=list(dead))
        return self.client.ask(request, m.Verdict)[0].redo

    def ack_window(self, step: int, *, rewinds: int) -> None:
        """Acknowledge a step that the optimiser has taken."""
        self.client.ask(m.AckWindow(**self._head(), step=step, rewinds=rewinds), m.Ok)

    def publish(self, step: int, *, tag: int, rewinds: int) -> None:
        """Report that rollout workers can read the weights of the current step, by their tag."""
        self.client.ask(m.Publish(**self._head(), step=step, rewinds=rewinds, tag=tag), m.Ok)

    # All roles

    def give_up(self, reason: str) -> None:
        """End the run for all workers."""
        self.client.ask(m.Giveup(**self._head(), reason=reason[:4096]), m.Ok)

    def _head(self) -> dict[str, str]:
        return self.client.head(self.partition)
