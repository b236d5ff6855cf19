"""A process that moves batches takes their memory from the system once, not again for each."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, sys
from xtoken_core.data_plane.allocator import CLIENT_KEEPS, set_allocator

taken = set_allocator(keep=CLIENT_KEEPS) if sys.argv[1] == "kept" else False

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def batch():
    return [bytearray(790_000) for _ in range(4)]

batch()
before = faults()
for _ in range(50):
    batch()
print(int(taken), faults() - before)
"""
PAGES_OF_A_BATCH = 4 * 790_000 // os.sysconf("SC_PAGE_SIZE")
GLIBC = pytest.mark.skipif(
    "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or "") if sys.platform == "linux" else True,
    reason="the setting is glibc's",
)


def run(how: str, **environment: str) -> tuple[bool, int]:
    """Whether the setting was taken, and the page faults of 50 batches."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=clean | environment, capture_output=True, text=True, check=True
    )
    taken, faults = done.stdout.split()
    return taken == "1", int(faults)


@GLIBC
def test_freed_memory_is_used_again() -> None:
    taken, faults = run("kept")
    assert taken
    assert faults < 3 * PAGES_OF_A_BATCH
    assert run("default")[1] > 10 * faults


@GLIBC
def test_environment_settings_are_kept() -> None:
    assert run("kept", MALLOC_TRIM_THRESHOLD_="131072") == (False, pytest.approx(50 * PAGES_OF_A_BATCH, rel=0.5))
