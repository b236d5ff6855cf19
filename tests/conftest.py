"""Set up before any test module is imported."""

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.examples import EVERY

# Several pytest workers share the cores: threads of torch that spin beside each other cost more than they give. Torch
# reads this when it is first imported, and so do the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The token of control planes lies there: those of tests have one of their own.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="xtoken-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
# Triton reads this once, when it is first imported: without a GPU its kernels run in the interpreter.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    # Before a test module is imported: its properties read this.
    if "not slow" not in config.option.markexpr:
        os.environ[EVERY] = "1"


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Restore the package's logger: a command in this process replaces its handler by one that writes to the test's."""
    log = logging.getLogger("xtoken")
    kept = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate, log.level = kept


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test opens, closed at its end."""
    with ExitStack() as opened:
        yield opened
