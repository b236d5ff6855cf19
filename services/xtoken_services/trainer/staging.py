"""Host copy of the training state, written by a background thread while training continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.tensor import DTensor


class Stage:
    """Host memory for one state, allocated once and refilled for every checkpoint; pinned if the state is on a GPU.

    The copy runs on a stream of its own: only kernels that change the state have to wait for it.
    """

    def __init__(self) -> None:
        self._host: dict[str, Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, state: Mapping[str, Tensor]) -> None:
        """Allocate the memory; otherwise the first copy does."""
        if self._host is None:
            on_gpu = any(value.is_cuda for value in state.values())
            self._host = _create_cpu_state_dict(dict(state), pin_memory=on_gpu)
            self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]

    def copy(self, state: Mapping[str, Tensor]) -> None:
        """Start the copy, after all work that the caller has enqueued before."""
        self.prepare(state)
        assert self._host is not None
        if self._stream is None:
            _copy_state_dict(dict(state), self._host)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy_state_dict(dict(state), self._host, non_blocking=True)
            for value in state.values():
                local_part(value).record_stream(self._stream)  # its memory is not reused before the copy is done
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Make the caller's stream wait for the copy, before work that changes the state."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def staged(self) -> dict[str, Any]:
        """Wait on the host until the copy is complete, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        assert self._host is not None
        return self._host


def local_part(value: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; another tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
