"""Seconds of the parts of a step, as the device sees them."""

import time

import pytest
import torch

from xtoken_services.trainer.timing import DeviceTimer


def test_laps_of_one_name_add_up_and_are_told_once() -> None:
    timer = DeviceTimer(torch.device("cpu"))
    for _ in range(2):
        timer.start()
        time.sleep(0.02)
        timer.lap("forward")
        timer.lap("loss")
    found = timer.collect()
    assert list(found) == ["forward", "loss"]
    assert found["forward"] >= 0.04 > found["loss"]
    assert timer.collect() == {}


def test_what_is_forgotten_is_not_told() -> None:
    timer = DeviceTimer(torch.device("cpu"))
    timer.start()
    timer.lap("forward")
    timer.reset()
    timer.lap("loss")
    assert list(timer.collect()) == ["loss"]


@pytest.mark.gpu
def test_a_gpu_is_timed_without_being_waited_for() -> None:
    device = torch.device("cuda", 0)
    a = torch.randn(8192, 8192, device=device)
    a @ a
    torch.cuda.synchronize()
    timer, began = DeviceTimer(device), time.perf_counter()
    timer.start()
    for _ in range(20):
        a @ a
    timer.lap("forward")
    queued = time.perf_counter() - began
    found = timer.collect()
    assert found["forward"] > 2 * queued, "the host was ahead"
    assert found["forward"] <= time.perf_counter() - began
