"""Actions after the device's work: in order, at the right time, errors where the main loop meets them."""

import threading
import time

import pytest
import torch

from xtoken_core.errors import QueueUnreachableError, XtokenError
from xtoken_core.wire import QueueError
from xtoken_services.common.processes.event_callbacks import EventCallbacks

CPU = torch.device("cpu")
SLOW = 100_000_000  # cycles, about 50 ms


def refuse() -> None:
    raise QueueError("lease_revoked", "gone")


def lose() -> None:
    raise QueueUnreachableError("nobody answers")


def test_on_a_cpu_an_action_runs_at_once_in_the_callers_thread() -> None:
    done: list[int] = []
    completions = EventCallbacks(CPU, "test", limit_s=1.0)
    completions.after(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()]
    with pytest.raises(QueueError, match="gone"):
        completions.after(refuse)
    completions.drain()
    completions.close()


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_actions_come_in_order_and_after_the_work_before_them(gpu: torch.device) -> None:
    completions = EventCallbacks(gpu, "test", limit_s=60.0)
    value, seen = torch.zeros((), device=gpu), list[tuple[int, float]]()
    copies = torch.zeros(3).pin_memory()
    for number in range(3):
        torch.cuda._sleep(SLOW)
        value += 1
        copies[number].copy_(value, non_blocking=True)
        completions.after(lambda number=number: seen.append((number, float(copies[number]))))
    assert len(seen) < 3
    completions.drain()
    assert seen == [(0, 1.0), (1, 2.0), (2, 3.0)]
    completions.close()


@pytest.mark.gpu
def test_what_is_refused_is_met_once_and_what_follows_is_done(gpu: torch.device) -> None:
    completions, done = EventCallbacks(gpu, "test", limit_s=60.0), list[int]()
    torch.cuda._sleep(SLOW)
    completions.after(refuse)
    completions.after(lambda: done.append(1))
    with pytest.raises(QueueError, match="gone"):
        completions.drain()
    completions.drain()
    assert done == [1]
    completions.close()


@pytest.mark.gpu
def test_a_lost_queue_ends_it(gpu: torch.device) -> None:
    completions, done = EventCallbacks(gpu, "test", limit_s=60.0), list[int]()
    torch.cuda._sleep(SLOW)
    completions.after(lose)
    completions.after(lambda: done.append(1))
    with pytest.raises(QueueUnreachableError, match="nobody answers"):
        completions.drain()
    completions.drain()
    completions.close()
    assert done == []


@pytest.mark.gpu
def test_a_device_that_does_not_finish_is_reported(gpu: torch.device) -> None:
    completions, done = EventCallbacks(gpu, "test", limit_s=0.05), list[int]()
    torch.cuda._sleep(20 * SLOW)
    completions.after(lambda: done.append(1))
    time.sleep(0.2)
    with pytest.raises(XtokenError, match=r"has not finished its work for 0\.05 s"):
        completions.check()
    completions.close()
    assert done == []
    torch.cuda.synchronize()
