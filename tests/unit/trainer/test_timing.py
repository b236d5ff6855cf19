"""Seconds of the parts of a step, as the device sees them."""

from __future__ import annotations

import time

import pytest
import torch

from services.trainer.timing import Stopwatch


def test_laps_of_one_name_add_up_and_are_told_once() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        watch.start()
        time.sleep(0.02)
        watch.lap("forward")
        watch.lap("loss")
    found = watch.take()
    assert list(found) == ["forward", "loss"]
    assert found["forward"] >= 0.04 > found["loss"]
    assert watch.take() == {}


def test_what_is_forgotten_is_not_told() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    watch.lap("forward")
    watch.forget()
    watch.lap("loss")
    assert list(watch.take()) == ["loss"]


@pytest.mark.gpu
def test_a_gpu_is_timed_without_being_waited_for() -> None:
    device = torch.device("cuda", 0)
    a = torch.randn(8192, 8192, device=device)
    a @ a
    torch.cuda.synchronize()
    watch, began = Stopwatch(device), time.perf_counter()
    watch.start()
    for _ in range(20):
        a @ a
    watch.lap("forward")
    queued = time.perf_counter() - began
    found = watch.take()
    assert found["forward"] > 2 * queued, "the host was ahead"
    assert found["forward"] <= time.perf_counter() - began
