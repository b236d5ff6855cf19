"""Partition of a run: the calls of `RunProtocol`, with the columns that travel beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from xtoken_core import schema
from xtoken_core.queue.budget import ENTRY_BYTES, REASON_BYTES, SLOT_BYTES
from xtoken_core.queue.partition import COMMON_HANDLERS, Handler, Partition, PriorLease
from xtoken_core.queue.response import Response
from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.run.slots import READABLE, Rings, SlotState
from xtoken_core.queue.samples import check_distinct
from xtoken_core.queue.sessions import Sessions
from xtoken_core.queue.store import Store
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire import messages as m

ClaimT = TypeVar("ClaimT", m.ClaimSlot, m.ClaimBatch)
SIGNAL_FIELDS = (schema.TEACHER_HIDDEN, schema.TEACHER_MAXIMA, schema.TEACHER_TOPK, schema.TEACHER_REQUESTS)


class RunPartition(Partition):
    """Partition of one run, sealed from the start.

    Attributes:
        run: State and protocol of the run.
        slot_columns: Columns of signals that travel through the queue.
    """

    def __init__(self, definition: m.OpenPartition, sessions: Sessions) -> None:
        if definition.tasks or definition.run is None:
            raise QueueError("bad_request", "the tasks of a run's partition are given by the protocol: leave them out")
        self.run = RunProtocol(sessions, definition.run, max_attempts=definition.max_attempts)
        super().__init__(definition, self.run.samples)
        self.slot_columns = SlotColumns(self.run.rings, self.store, definition.run.teachers)
        self.sealed = True

    # Calls

    def handle(self, request: m.PartitionRequest) -> Response | None:
        """Answer a request; None means "not yet".

        Raises:
            QueueError: The request is refused.
        """
        call = PROTOCOL_CALLS.get(type(request))
        if call is None:
            return super().handle(request)
        reply = call(self.run, request)
        return None if reply is None else Response(reply)

    def put(self, request: m.Put, columns: dict[str, Column], room: int) -> Response:
        """Finish a leased block with its rows and tombstones, however little room there is."""
        check_distinct(request.ids)
        self.check(columns, len(request.ids))
        # Protocol first: it refuses before a byte is stored.
        self.keep(request.ids, columns, self.run.put_block(request, columns, self.routes_in(request.ids, columns)))
        return Response(m.Stored(room=max(room - sum(c.nbytes for c in columns.values()), 0)))

    def routes_in(self, ids: Sequence[int], columns: Mapping[str, Column]) -> dict[int, int]:
        """Return the bits of each row's teachers; none without the column `schema.TEACHERS`.

        Raises:
            QueueError: `bad_request` if the column is of another kind, or a row is compared by none of the run's
                teachers.
        """
        column = columns.get(schema.TEACHERS.name)
        if column is None:
            return {}
        if column.kind != "dense" or column.dtype != schema.TEACHERS.dtype or column.item_shape:
            raise QueueError("bad_request", f"{schema.TEACHERS.name!r} holds one {schema.TEACHERS.dtype} per row")
        routes = dict(zip(ids, column.values.cast("q"), strict=True))
        count = self.run.definition.teachers
        if not all(0 < bits < 1 << count for bits in routes.values()):
            raise QueueError("bad_request", f"{schema.TEACHERS.name!r} names some of teachers 0 to {count - 1}")
        return routes

    def complete(self, request: m.Complete, columns: dict[str, Column], _room: int) -> Response:
        """Mark a teacher's slot as full; columns are the rows of a signal that travels through the queue."""
        self.drop_stale()
        if not columns:
            return Response(self.run.complete(request))
        ring, index, slot = self.run.slot_of(request.session, request.lease)
        ids, generation = slot.ids, slot.generation  # completing frees a slot whose samples have all died
        # Everything that can be refused comes before `complete` changes the state.
        self.slot_columns.check(ring.teacher, ids, columns)
        self.check(columns, len(ids))
        reply = self.run.complete(request)
        self.learn(columns)
        self.slot_columns.put(ring.id, index, generation, ids, columns)
        return Response(reply)

    def window(self, request: m.Window) -> Response | None:
        """Read the rows of a step, once all are there."""
        reply = self.run.read_window(request)
        if not isinstance(reply, m.WindowRows):
            return None if reply is None else Response(reply)
        return Response(reply, self.store.read(reply.ids, request.fields))

    def claim_slot(self, request: m.ClaimSlot) -> Response | None:
        """Lease a teacher's micro-batch with a free slot, and read its rows."""
        return self._claim(request, self.run.claim_slot)

    def claim_batch(self, request: m.ClaimBatch) -> Response | None:
        """Lease a trainer's micro-batch, and read its rows and the signals that travel through the queue."""
        response = self._claim(request, self.run.claim_batch)
        if response is None or not isinstance(response.reply, m.Claimed):
            return response
        self.drop_stale()
        signals: dict[str, Column] = {}
        # Of a ring in shared memory there are no columns here, or the counts of a teacher's requests only.
        for ref in response.reply.slots:
            signals |= self.slot_columns.read(ref.ring, ref.slot, ref.generation)
        response.columns |= signals
        return response

    def ack_window(self, request: m.AckWindow) -> Response:
        """Advance past a step and free its rows."""
        self.store.drop(self.run.ack_window(request))
        return Response(m.Ok())

    def rewind(self, request: m.Rewind) -> Response:
        """Start, or start again, at a step."""
        self.store.drop(self.run.rewind(request))
        return Response(m.Rewound(rewinds=self.run.rewinds))

    def misplaced(self) -> QueueError:
        """Return the refusal of a call of the generic queue."""
        return QueueError("forbidden", f"partition {self.name!r} belongs to a run: it has calls of its own")

    HANDLERS: ClassVar[Mapping[type[m.Request], Handler]] = {
        **COMMON_HANDLERS,
        m.Window: window,
        m.ClaimSlot: claim_slot,
        m.ClaimBatch: claim_batch,
        m.AckWindow: ack_window,
        m.Rewind: rewind,
    }

    # State

    @property
    def skipped(self) -> Mapping[int, str]:
        """Return the reason of every tombstone, by position."""
        return self.run.skipped

    def lease_ids(self) -> list[int]:
        """Return the number of every current lease, of samples and of blocks."""
        return [*super().lease_ids(), *self.run.blocks.leases]

    def prior_lease(self, request: m.Ack | m.Complete | m.Nack) -> PriorLease:
        """Return the lease that a request names, for the write-ahead log."""
        if isinstance(request, m.Ack):
            return PriorLease()
        if request.lease in self.run.blocks.leases:
            return PriorLease(block=self.run.blocks.leases[request.lease].block)
        return super().prior_lease(request)

    @property
    def overhead(self) -> int:
        """Return the bookkeeping of what the partition holds in bytes."""
        run = self.run
        slots = sum(len(ring.slots) for ring in run.rings.by_pair.values()) * SLOT_BYTES
        routes = len(run.slots.routes) * ENTRY_BYTES
        return super().overhead + run.skipped.nbytes + slots + routes + len(run.blocks.refused) * REASON_BYTES

    def drop_stale(self) -> None:
        """Drop the columns of signals whose slot was freed or filled again."""
        self.slot_columns.drop_stale()

    def statistics(self) -> dict[str, Any]:
        """Return the run's part of the statistics."""
        run = self.run
        rings = []
        for ring in run.rings.by_pair.values():
            counts = Counter(slot.state for slot in ring.slots)
            slots = {state.name.lower(): counts[state] for state in SlotState}
            rings.append({"teacher": ring.teacher, "rank": ring.rank, "opened": ring.opened, "slots": slots})
        document = {
            "positions": run.positions,
            "samples_per_step": run.samples_per_step,
            "group": run.definition.group,
            "groups": run.definition.groups,
            "step": run.cursor,
            "rewinds": run.rewinds,
            "skipped": len(run.skipped),
            "ended": run.ended,
            "failed": run.failed,
            "published": run.published,
            "weights_tag": run.weights_tag,
            "blocks_leased": len(run.blocks.leases),
            "rings": rings,
        }
        return {"run": document}

    def _claim(self, request: ClaimT, grant: Callable[[ClaimT], m.Claimed | m.AlreadyDone | None]) -> Response | None:
        """Lease samples and read their rows; a lease whose rows cannot be read is undone."""
        before = self.samples.last_lease
        reply = grant(request)
        if not isinstance(reply, m.Claimed):
            return None if reply is None else Response(reply)
        try:
            return Response(reply, self.store.read(reply.ids, request.fields))
        except BaseException:
            if reply.lease > before:
                self.run.slots.undo_claim(reply.lease)
            raise


PROTOCOL_CALLS: dict[type[m.Request], Callable[[RunProtocol, Any], m.Reply | None]] = {
    m.LeaseBlock: RunProtocol.lease_block,
    m.Nack: RunProtocol.nack,
    m.AwaitTrainer: RunProtocol.await_trainer,
    m.AnnounceRing: RunProtocol.announce_ring,
    m.AwaitRing: RunProtocol.await_ring,
    m.OpenedRing: RunProtocol.confirm_ring,
    m.AwaitOpened: RunProtocol.await_opened,
    m.Release: RunProtocol.release,
    m.CheckStep: RunProtocol.check_step,
    m.Publish: RunProtocol.publish,
    m.Giveup: RunProtocol.give_up,
}
"""Calls whose replies have no columns: the protocol answers them itself."""


class SlotColumns:
    """Columns of a run's store by ring, slot and generation.

    They are volatile: never journalled, and dropped with the ring, the slot's release or a rewind. A signal in memory
    that teacher and student share has none but the requests of a teacher on a server.
    """

    def __init__(self, rings: Rings, store: Store, teachers: int) -> None:
        self.rings, self.store = rings, store
        self._names = [
            frozenset(schema.field_name(field, index) for field in SIGNAL_FIELDS) for index in range(teachers)
        ]
        # Ids and column names of each filling, as the store takes them.
        self._rows: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[str, ...]]] = {}

    def check(self, teacher: int, ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Check that columns belong to this teacher's signal and have a row per sample of the slot.

        Raises:
            QueueError: `bad_request`, with the column's name.
        """
        for name, column in columns.items():
            if name not in self._names[teacher]:
                raise QueueError("bad_request", f"{name!r} is no column of the signal of teacher {teacher}")
            if column.rows != len(ids):
                raise QueueError("bad_request", f"{name!r} has {column.rows} rows, the slot {len(ids)} samples")

    def put(self, ring: int, slot: int, generation: int, ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Store the columns of a filling, a row for each of `ids`."""
        if columns:
            self.store.put(ids, dict(columns), ids)
            self._rows[ring, slot, generation] = tuple(ids), tuple(columns)

    def read(self, ring: int, slot: int, generation: int) -> dict[str, Column]:
        """Return the columns of a filling; empty for a signal in shared memory."""
        rows = self._rows.get((ring, slot, generation))
        return self.store.read(*rows) if rows else {}

    def drop_stale(self) -> None:
        """Drop the columns whose slot has been freed or filled again."""
        # By generation: a slot that was released and filled again holds other columns under the same index.
        current = {
            (ring.id, index, slot.generation)
            for ring in self.rings.by_pair.values()
            for index, slot in enumerate(ring.slots)
            if slot.state in READABLE
        }
        for key in [key for key in self._rows if key not in current]:
            self.store.drop_fields(*self._rows.pop(key))
