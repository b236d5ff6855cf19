"""Times of a call on a GPU, by events and by a CUDA graph, and the bandwidth of a copy beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor


def nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor's values."""
    return x.numel() * x.element_size()


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak of a second call's memory above what is allocated before."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed_by_events(function: Callable[[], object], *, repeats: int = 20) -> float:
    """Measure the median of `repeats` runs after 3 that warm up, in milliseconds."""
    times = []
    for turn in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(end))
    return median(times)


def timed_by_graph(function: Callable[[], object], runs: int = 1) -> float:
    """Return the times of replays of one captured call, as `timed_by_events` does, which holds `runs` runs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()
    time = timed_by_events(graph.replay) / runs
    del graph, kept
    torch.cuda.empty_cache()
    return time


def head_products(
    x: Tensor, w: Tensor, of_teacher: Sequence[tuple[Tensor, Tensor]], *, logits_times: int = 1
) -> Callable[[], None]:
    """Return the matrix products of a loss from hidden states, each as one.

    Args:
        x: The student's hidden states `[N, H]`.
        w: Its head `[V, H]`.
        of_teacher: States and heads of the teacher's products.
        logits_times: How often the student's logits are made.
    """
    logits, others = x @ w.t(), [y @ head.t() for y, head in of_teacher]
    by_hidden, by_weight = torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        for _ in range(logits_times):
            torch.mm(x, w.t(), out=logits)
        torch.mm(logits, w, out=by_hidden)
        torch.mm(logits.t(), x, out=by_weight)
        for (y, head), out in zip(of_teacher, others, strict=True):
            torch.mm(y, head.t(), out=out)

    return run


def waits_for_the_device(function: Callable[[], object]) -> bool:
    """Return True if a call synchronises with the device.

    That is asked before a capture: one that fails leaves PyTorch's generator of random numbers in the capture's state.
    """
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that a copy of 4 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes(source) / timed_by_events(lambda: target.copy_(source)) * 1e3
