"""Detection of a supervisor: processes that one has started all see the same machine."""

from __future__ import annotations

import os

MARK = "XTOKEN_ATTEMPT"
"""Environment variable of every supervised process and its children: the worker and its attempt."""


def supervised() -> bool:
    """Return whether a supervisor has started this process."""
    return MARK in os.environ
