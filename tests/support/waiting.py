"""A condition that comes true in time."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within_s: float = 90.0) -> None:
    """Wait until the condition holds; fail if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
