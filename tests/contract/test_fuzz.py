"""A short fuzz run; `make fuzz` is the long one."""

from pathlib import Path

import psutil

from tests.contract.fuzz import MEMORY, fuzz, grew_too_much
from tests.contract.processes import queue_process, tcp_address

COUNT = 5_000


def test_mutated_messages_do_no_harm(short_tmp: Path) -> None:
    address = tcp_address(short_tmp / "fuzz")
    with queue_process(address, "--memory-limit", str(MEMORY)) as process:
        found = fuzz(address, psutil.Process(process.pid), go_on=lambda outcome: outcome.sent < COUNT, seed=1)
        assert process.poll() is None
    assert found.errors == []
    assert min(found.answered, found.raw, found.honest) > 20
    assert not grew_too_much(found)
