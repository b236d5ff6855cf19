"""The mark of a process that a supervisor started, and how every Python process is started."""

from __future__ import annotations

import os
import sys

from setproctitle import setproctitle

PYTHON = (sys.executable, "-P", "-m")
"""Begin of the command line of a Python process: -P keeps the working directory from being searched for modules."""
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MARK = "XTOKEN_ATTEMPT"
"""Environment variable of every supervised process and its children: the worker and its attempt."""


def supervised() -> bool:
    """Return whether a supervisor has started this process."""
    return MARK in os.environ


def set_title(name: str) -> None:
    """Set the title of this process, with its mark: `/proc` shows that of a forked process nowhere else."""
    mark = os.environ.get(MARK)
    setproctitle(f"xtoken {name}" if mark is None else f"xtoken {name} {MARK}={mark}")
