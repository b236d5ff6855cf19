"""The calls of a run's pipeline, for the workers of that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xtoken_core.data_plane.client import DataPlaneClient, new_id
from xtoken_core.wire import Column, pack_columns, unpack_columns
from xtoken_core.wire import messages as m


@dataclass(frozen=True)
class StepRows:
    """A step's rows: positions that have one (dead ones included), the others, and their columns."""

    ids: list[int]
    skipped: list[int]
    dead: list[int]
    columns: dict[str, Column]


class RunClient:
    """The run whose queue a client is connected to.

    Waiting calls return None if nothing came in `wait_s`. Beyond `DataPlaneClient`'s errors they raise QueueError with
    the codes `rewound` (start again at `detail["step"]`), `ring_closed`, `lease_revoked`, `exhausted` and `run_failed`,
    and `AlreadyDone` where there is nothing left to do.
    """

    def __init__(self, client: DataPlaneClient, partition: str | None = None) -> None:
        self.client = client
        self.partition = partition or client.partition

    # Collators

    def lease_block(self, *, wait_s: float) -> m.Block | None:
        """The lowest free block of positions."""
        found = self.client.wait(lambda s: m.LeaseBlock(**self._head(), wait_s=s), m.Block, wait_s)
        return found[0] if found else None

    def put_block(
        self, lease: int, ids: Sequence[int], columns: Mapping[str, Column], tombstones: Mapping[int, str]
    ) -> None:
        """Finish a block: every position gets its row or its tombstone."""
        heads, buffers = pack_columns(dict(columns))
        request = m.Put(**self._head(), ids=list(ids), columns=heads, lease=lease, tombstones=dict(tombstones))
        self.client.ask(request, m.Stored, buffers)

    def nack(self, lease: int, ids: Sequence[int], reason: str) -> None:
        """A block, or samples of a micro-batch, could not be done."""
        self.client.nack(self.partition, lease, ids, reason)

    # Teachers

    def await_trainer(self, rank: int, *, wait_s: float) -> m.Trainer | None:
        """The trainer of a rank, once it stands where the run goes on."""
        found = self.client.wait(lambda s: m.AwaitTrainer(**self._head(), rank=rank, wait_s=s), m.Trainer, wait_s)
        return found[0] if found else None

    def announce_ring(self, teacher: int, rank: int, trainer: str, handle: bytes) -> int:
        """Offer a ring to a trainer session; returns its number."""
        request = m.AnnounceRing(**self._head(), teacher=teacher, rank=rank, trainer=trainer, handle=handle)
        return self.client.ask(request, m.Ring)[0].ring

    def await_opened(self, ring: int, *, wait_s: float) -> bool:
        """Whether the trainer has opened the ring by now."""
        found = self.client.wait(lambda s: m.AwaitOpened(**self._head(), ring=ring, wait_s=s), m.Ok, wait_s)
        return found is not None

    def claim_slot(
        self, ring: int, ids: Sequence[int], fields: Sequence[str], *, rewinds: int, wait_s: float
    ) -> tuple[m.Claimed, dict[str, Column]] | None:
        """The next micro-batch together with a free slot."""
        return self.client.claimed(
            lambda s: m.ClaimSlot(
                **self._head(), ring=ring, ids=list(ids), fields=list(fields), rewinds=rewinds, wait_s=s
            ),
            wait_s,
        )

    def complete(self, lease: int, columns: Mapping[str, Column] | None = None) -> None:
        """The slot of a lease is full; its columns, where the signal comes through the queue."""
        self.client.complete(self.partition, lease, columns)

    # Teachers and trainers

    def window(self, step: int, fields: Sequence[str], *, rewinds: int, wait_s: float) -> StepRows | None:
        """Columns of a step's rows, once every position has its row or tombstone."""
        found = self.client.wait(
            lambda s: m.Window(**self._head(), step=step, fields=list(fields), rewinds=rewinds, wait_s=s),
            m.WindowRows,
            wait_s,
        )
        if found is None:
            return None
        reply, buffers = found
        return StepRows(reply.ids, reply.skipped, reply.dead, unpack_columns(reply.columns, buffers))

    # Trainers

    def rewind(self, step: int, skipped: Mapping[int, str], dead: Mapping[int, str]) -> int:
        """Start (again) at a step; returns the count of rewinds, which later calls name."""
        request = m.Rewind(**self._head(), step=step, skipped=dict(skipped), dead=dict(dead))
        return self.client.ask(request, m.Rewound)[0].rewinds

    def await_ring(self, teacher: int, *, wait_s: float) -> m.Ring | None:
        """The ring of one of the rank's teachers."""
        found = self.client.wait(lambda s: m.AwaitRing(**self._head(), teacher=teacher, wait_s=s), m.Ring, wait_s)
        return found[0] if found else None

    def opened_ring(self, teacher: int, ring: int) -> None:
        """Say that the ring is open and its canary was read."""
        self.client.ask(m.OpenedRing(**self._head(), teacher=teacher, ring=ring), m.Ok)

    def claim_batch(
        self, ids: Sequence[int], fields: Sequence[str], *, rewinds: int, wait_s: float
    ) -> tuple[m.Claimed, dict[str, Column]] | None:
        """A micro-batch, once every teacher's signal is there; the signals' fields come with it."""
        return self.client.claimed(
            lambda s: m.ClaimBatch(**self._head(), ids=list(ids), fields=list(fields), rewinds=rewinds, wait_s=s),
            wait_s,
        )

    def release(self, ring: int, slot: int, generation: int) -> None:
        """The backward that read a slot has completed."""
        self.client.ask(m.Release(**self._head(), ring=ring, slot=slot, generation=generation), m.Ok)

    def check_step(self, step: int, dead: Sequence[int], *, rewinds: int) -> bool:
        """Whether the step must be done again."""
        request = m.CheckStep(**self._head(), step=step, rewinds=rewinds, dead=list(dead))
        return self.client.ask(request, m.Verdict)[0].redo

    def ack_window(self, step: int, *, rewinds: int) -> None:
        """The optimiser has taken the step."""
        self.client.ask(m.AckWindow(**self._head(), step=step, rewinds=rewinds), m.Ok)

    # Anybody

    def give_up(self, reason: str) -> None:
        """End the run for everybody."""
        self.client.ask(m.Giveup(**self._head(), reason=reason[:4096]), m.Ok)

    def _head(self) -> dict[str, str]:
        return {"id": new_id(), "session": self.client.session, "partition": self.partition}
