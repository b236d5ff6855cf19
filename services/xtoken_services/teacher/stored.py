"""A teacher whose output is in a store: records are unpacked into the slots of a ring."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.buffers import array_of
from xtoken_core.served_requests import RequestCounts
from xtoken_core.teacher_store.identity import StoreError
from xtoken_core.teacher_store.shards import digest_of
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_core.transports.head import load_head
from xtoken_services.common.stores.teacher_stores import open_store
from xtoken_services.common.text.run_order import record_of
from xtoken_services.teacher.base import Teacher, TeacherBatch

THREADS = 4
"""Records that are decompressed at a time, at most."""


class StoredTeacher(Teacher):
    """The output of a model in a store.

    Args:
        run: The run.
        teacher: Number of the teacher.
        device: Device of the slots.

    Raises:
        StoreError: There is no store, or it was built from something else.
    """

    def __init__(self, run: ResolvedRun, teacher: int, device: torch.device) -> None:
        self.run, self.device = run, device
        self._spec, self._files = run.spec.teacher[teacher], run.teachers[teacher]
        self.head_width = self._files.head_width
        self.store: TeacherStore = open_store(run, teacher)
        self._pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="store")
        self._counts = RequestCounts()

    @contextmanager
    def head_in(self, memory: Float[Tensor, "V_m H"]) -> Iterator[None]:
        """Read the head, all that is needed of the model's weights, into shared memory."""
        dtype: torch.dtype = getattr(torch, self._spec.dtype)
        memory.copy_(load_head(self._spec.model, width=self.head_width, hidden=self._files.hidden_size, dtype=dtype))
        yield

    def _fill(self, batch: TeacherBatch, view: Tensor, maxima: Tensor | None) -> None:
        on_host = view if view.device.type == "cpu" else torch.empty(view.shape, dtype=view.dtype)
        self._read_into(on_host, batch)
        if on_host is not view:
            view.copy_(on_host)

    def _read_into(self, values: Float[Tensor, "B T_t C"], batch: TeacherBatch) -> None:
        """Fill a slot's memory on the host with the records of a micro-batch; a dead sample's need not be there.

        Raises:
            StoreError: A record is missing, damaged, or was made from other tokens.
        """
        began = time.monotonic()
        array = array_of(values)
        gaps = np.ones(array.shape[:2], dtype=bool)
        wanted = []
        for position, ids, (row, part) in zip(batch.positions, batch.unpadded(), batch.parts(), strict=True):
            if len(ids):
                gaps[row, part] = False
                wanted.append((record_of(self.run, position), ids, array[row, part]))
        frames = self.store.frames(record for record, _, _ in wanted)

        def unpack(record: int, ids: Tensor, target: np.ndarray) -> None:
            self.store.check_tokens(record, digest_of(ids.numpy().tobytes()), len(ids))
            frame = frames[record]
            if isinstance(frame, StoreError):
                raise frame
            self.store.unpack_into(record, frame, target)

        list(self._pool.map(unpack, *zip(*wanted, strict=True)) if wanted else ())
        array[gaps] = wanted[-1][2][-1] if wanted else 0  # a repeated token changes no maximum over positions
        read = sum(self.store.entries[record].size for record, _, _ in wanted)
        self._counts = self._counts.plus(RequestCounts(len(wanted), 0, read, time.monotonic() - began))

    def new_requests(self) -> RequestCounts:
        """Return the records read since the last call."""
        counts, self._counts = self._counts, RequestCounts()
        return counts

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
