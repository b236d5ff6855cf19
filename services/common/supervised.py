"""Whether a supervisor has started this process: then it and all others of its run see the same machine."""

from __future__ import annotations

import os

MARK = "XTOKEN_ATTEMPT"
"""In the environment of every process of a run, and of its children: which start of which worker it is."""


def supervised() -> bool:
    """Whether this process is a worker that a supervisor has started, not somebody by hand."""
    return MARK in os.environ
