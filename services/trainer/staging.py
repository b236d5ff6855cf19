"""A copy of the training's state on the host, which can be written down while the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.tensor import DTensor


class Stage:
    """Host memory for one state, taken once and filled anew for every checkpoint; pinned where the state is on a GPU.

    The copy runs on a stream of its own: only what changes the state has to wait for it.
    """

    def __init__(self) -> None:
        self._host: dict[str, Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, state: Mapping[str, Tensor]) -> None:
        """Take the memory; else the first copy does."""
        if self._host is None:
            on_gpu = any(value.is_cuda for value in state.values())
            self._host = _create_cpu_state_dict(dict(state), pin_memory=on_gpu)
            self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]

    def copy(self, state: Mapping[str, Tensor]) -> None:
        """Begin to copy. What the caller has enqueued before is copied with it."""
        self.prepare(state)
        assert self._host is not None
        if self._stream is None:
            _copy_state_dict(dict(state), self._host)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy_state_dict(dict(state), self._host, non_blocking=True)
            for value in state.values():
                held_here(value).record_stream(self._stream)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Let what the caller enqueues next come after the copy: it may change the state."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def staged(self) -> dict[str, Any]:
        """The copy, once it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        assert self._host is not None
        return self._host


def held_here(value: Tensor) -> Tensor:
    """What this rank holds of a tensor: its own part of one that is shared among ranks."""
    return value.to_local() if isinstance(value, DTensor) else value
