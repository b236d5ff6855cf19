"""Launches beside the current stream: what does not depend on each other runs at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it bare


@contextmanager
def second_stream(device: torch.device) -> Iterator[None]:
    """Run the block's kernels on a side stream, after all queued work; call `join` before reading their results.

    On the CPU the block runs as without it.

    Tensors that are created here belong to the second stream. They can be freed at any time: the stream waits for the
    current one before it is used again.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    # What the block reads has been launched on the current stream.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def join(device: torch.device) -> None:
    """Make the current stream wait for the side stream's kernels."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


def event_of_second(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind what has been launched on the second stream so far; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it bare
    event.record(_stream(device))
    return event


def wait_for(device: torch.device, event: torch.cuda.Event | None) -> None:
    """Make the current stream wait for an event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
