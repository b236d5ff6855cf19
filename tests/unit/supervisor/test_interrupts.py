"""Signals that are counted instead of obeyed."""

import os
import signal
import threading

import pytest

from xtoken_services.supervisor.interrupts import Interrupts


def test_signals_are_counted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert not interrupts.wait(0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.wait(0)
    assert (interrupts.count, interrupts.status) == (2, 143)
    assert signal.getsignal(signal.SIGTERM) == before


def test_ignored_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.wait(0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_handle_no_signals() -> None:
    seen = []

    def enter() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_wait_without_a_signal(seconds: float) -> None:
    with Interrupts() as interrupts:
        assert not interrupts.wait(seconds)
