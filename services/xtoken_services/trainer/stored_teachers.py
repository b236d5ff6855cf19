"""The trainer's side of teachers that are read from stores: micro-batches are read ahead by threads."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.data_plane.queue_client import AlreadyDone
from xtoken_core.losses.lazy_logits import HeadProjection, Logits
from xtoken_core.plan import MicroBatch
from xtoken_core.teacher_store.identity import StoreError
from xtoken_core.teacher_store.shards import digest_of
from xtoken_core.teacher_store.store import TeacherStore, is_miss
from xtoken_core.topk_logits import read_topk
from xtoken_core.transports.head import load_head
from xtoken_core.wire import Column, QueueError
from xtoken_services.common.batches.step_plan import StepPlan, plan_fields, plan_step, topk_settings
from xtoken_services.common.processes.worker import Worker
from xtoken_services.common.stores.teacher_stores import open_store
from xtoken_services.common.text.run_order import record_of

AHEAD = 4
"""Micro-batches that are read before they are needed: the threads hide the time of decompression."""


class Side(NamedTuple):
    """One teacher that is read from a store.

    Attributes:
        store: Its store.
        ids_field: The column with its token ids.
        head: `[V_t, H]` on the trainer's device; None for largest logits.
    """

    store: TeacherStore
    ids_field: str
    head: Tensor | None


@dataclass(frozen=True)
class Values:
    """Values of a micro-batch as a store has them.

    Attributes:
        tensor: `[B, T, C]`, or `[1, T, C]` of a packed row, laid out as a slot of a ring.
        lengths: Tokens of each sample.
        errors: By sample, the error of one whose record could not be read.
        nbytes: Bytes that were read.
    """

    tensor: Tensor
    lengths: tuple[int, ...]
    errors: dict[int, StoreError]
    nbytes: int


class StoredTeachers:
    """The teachers of a run that are read from stores; with none, every call does nothing.

    Args:
        worker: The session.
        device: The trainer's device.
        rank: Number of this rank in its node group.

    Attributes:
        waited_s: Seconds that the trainer has waited for values, over all steps.
    """

    def __init__(self, worker: Worker, device: torch.device, *, rank: int) -> None:
        self.worker, self.run, self.device, self.rank = worker, worker.run, device, rank
        self.sides: dict[int, Side] = {}
        for teacher, spec in enumerate(self.run.spec.teacher):
            if spec.store is not None:
                self.sides[teacher] = self._open(teacher)
        threads = min(AHEAD, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="store") if self.sides else None
        self._wanted: deque[MicroBatch] = deque()
        self._reading: dict[tuple[int, ...], Future[dict[int, Values]]] = {}
        self._peeked = -1
        self._step: tuple[int, int] = (0, 0)
        self.waited_s = 0.0
        self._waited_before = 0.0
        self._hits = self._bytes = 0

    def follow(self, step: StepPlan, rewinds: int) -> None:
        """Read a step's micro-batches ahead, and the next step's as soon as its rows are there.

        Args:
            step: The step that is trained now.
            rewinds: The queue's number of rewinds.
        """
        if self._pool is None:
            return
        self._step = step.step, rewinds
        own = [batch for batch in step.plan.ranks[self.rank] if batch.ids]
        for ids in self._reading.keys() - {batch.ids for batch in own}:
            self._reading.pop(ids).cancel()
        self._wanted = deque(batch for batch in own if batch.ids not in self._reading)
        self._peeked = -1
        self._submit()

    def take(self, batch: MicroBatch, columns: Mapping[str, Column], dead: Sequence[int]) -> dict[int, Tensor]:
        """Return each stored teacher's values of a micro-batch, by number.

        Args:
            batch: The micro-batch.
            columns: Its rows, from which the teachers' token ids are compared with the stores'.
            dead: Samples that are masked; their records need not be there.

        Raises:
            StoreError: A record is missing, damaged, or was made from other tokens.
        """
        if self._pool is None:
            return {}
        began = time.monotonic()
        reading = self._reading.pop(batch.ids, None)
        self._wanted = deque(other for other in self._wanted if other.ids != batch.ids)
        values = reading.result() if reading is not None else self._read(batch)
        checked = {
            teacher: self._checked(teacher, batch, values[teacher], columns[side.ids_field], set(dead))
            for teacher, side in self.sides.items()
        }
        self._submit()
        self.waited_s += time.monotonic() - began
        return checked

    def logits(self, teacher: int, values: Tensor) -> Logits:
        """Return a stored teacher's logits on the trainer's device: their factors, or the largest.

        Args:
            teacher: Its number.
            values: From `take`.
        """
        on_device = values.to(self.device, non_blocking=True)
        head = self.sides[teacher].head
        if head is None:
            return read_topk(on_device, topk_settings(self.run, teacher))
        return HeadProjection(on_device, head)

    def metrics(self, skipped: Mapping[int, str]) -> dict[str, float | int]:
        """Return this rank's metrics since the last call.

        Args:
            skipped: Positions of the step that have no row, with the reason.

        Returns:
            Records that were read; positions that were skipped for what a store does not have; bytes that were read,
            compressed; seconds that the trainer waited for them.
        """
        if self._pool is None:
            return {}
        values = {
            "store_hits": self._hits,
            "store_misses": sum(map(is_miss, skipped.values())),
            "store_bytes": self._bytes,
            "store_wait_seconds": round(self.waited_s - self._waited_before, 6),
        }
        self._hits = self._bytes = 0
        self._waited_before = self.waited_s
        return values

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _open(self, teacher: int) -> Side:
        run, spec = self.run, self.run.spec.teacher[teacher]
        same = run.same_tokenizer[teacher]
        field = schema.INPUT_IDS.name if same else schema.field_name(schema.TEACHER_INPUT_IDS, teacher)
        store = open_store(run, teacher)
        head = None
        if store.identity.content == "hidden":
            files, dtype = run.teachers[teacher], getattr(torch, spec.dtype)
            loaded = load_head(spec.model, width=files.head_width, hidden=files.hidden_size, dtype=dtype)
            head = loaded[: files.vocab_size].to(self.device)
        return Side(store, field, head)

    def _submit(self) -> None:
        """Submit micro-batches to the threads, up to the limit of those in memory."""
        assert self._pool is not None
        if len(self._wanted) + len(self._reading) < AHEAD:
            self._peek()
        while self._wanted and len(self._reading) < AHEAD:
            batch = self._wanted.popleft()
            self._reading[batch.ids] = self._pool.submit(self._read, batch)

    def _peek(self) -> None:
        """Add the next step's micro-batches, if its rows are there: its plan is the same at any time."""
        step, rewinds = self._step[0] + 1, self._step[1]
        if step == self._peeked or step >= self.run.steps:
            return
        try:
            rows = self.worker.queue.window(step, plan_fields(self.run), rewinds=rewinds, wait_s=0.0)
        except (QueueError, AlreadyDone):
            return  # reading ahead is no reason to fail: the step itself reports it
        if rows is not None:
            self._peeked = step
            ranks = plan_step(self.run, step, rows).plan.ranks
            self._wanted.extend(batch for batch in ranks[self.rank] if batch.ids)

    def _read(self, batch: MicroBatch) -> dict[int, Values]:
        """Read every stored teacher's values of a micro-batch: the work of a thread."""
        return {teacher: self._values(teacher, batch) for teacher in self.sides}

    def _values(self, teacher: int, batch: MicroBatch, lengths: Sequence[int] | None = None) -> Values:
        """Return one teacher's values, laid out as in a slot.

        Args:
            teacher: Its number.
            batch: The micro-batch.
            lengths: Tokens of each sample; None: as the store has them.
        """
        store = self.sides[teacher].store
        identity, width = store.identity, batch.widths[1 + teacher]
        records = [record_of(self.run, position) for position in batch.ids]
        entries = [store.entries.get(record) for record in records]
        counts = tuple(lengths) if lengths is not None else tuple(e.tokens if e else 0 for e in entries)
        dtype: torch.dtype = getattr(torch, identity.value_dtype)
        rows = 1 if batch.packed else len(records)
        tensor = torch.empty(rows, width, identity.width, dtype=dtype, pin_memory=self.device.type == "cuda")
        array = array_of(tensor)
        errors: dict[int, StoreError] = {}
        nbytes, filler = 0, np.zeros(identity.width, dtype=array.dtype)
        gaps = []
        frames = store.frames(records)
        for sample, record, entry, (row, part) in zip(
            batch.ids, records, entries, _parts(counts, packed=batch.packed), strict=True
        ):
            target, frame = array[row, part], frames[record]
            try:
                if isinstance(frame, StoreError):
                    raise frame
                if entry is None or entry.tokens != len(target):
                    raise StoreError(f"record {record} does not fit its row")
                store.unpack_into(record, frame, target)
                nbytes += entry.size
                filler = target[-1] if len(target) else filler
            except StoreError as error:
                errors[sample] = error
                gaps.append(target)
            if not batch.packed:
                gaps.append(array[row, part.stop :])
        if batch.packed:
            gaps.append(array[0, sum(counts) :])
        for gap in gaps:  # padding repeats a token, so that it changes no maximum over positions
            gap[:] = filler
        return Values(tensor, counts, errors, nbytes)

    def _checked(self, teacher: int, batch: MicroBatch, values: Values, column: Column, dead: set[int]) -> Tensor:
        """Return a teacher's values, once they belong to the rows' own tokens.

        Raises:
            StoreError: They do not, or a record could not be read.
        """
        assert column.offsets is not None
        offsets = column.offsets.tolist()
        lengths = tuple(after - before for before, after in itertools.pairwise(offsets))
        store = self.sides[teacher].store
        for index, position in enumerate(batch.ids):
            if position in dead:
                continue
            record = record_of(self.run, position)
            start, stop = 8 * offsets[index], 8 * offsets[index + 1]
            if record in store.entries:
                store.check_tokens(record, digest_of(column.values[start:stop]), lengths[index])
            if position in values.errors:
                raise values.errors[position]
            self._hits += 1
        self._bytes += values.nbytes
        if lengths == values.lengths:
            return values.tensor
        return self._values(teacher, batch, lengths).tensor  # of a dead sample the store has no, or another, length


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor's memory as an array; half precision as the bits, which numpy may not know."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy().view(np.uint16)


def _parts(lengths: Iterable[int], *, packed: bool) -> list[tuple[int, slice]]:
    """Return row and tokens of each sample."""
    if not packed:
        return [(row, slice(0, length)) for row, length in enumerate(lengths)]
    ends = list(itertools.accumulate(lengths))
    return [(0, slice(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
