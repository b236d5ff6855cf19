"""Detect whether a supervisor started this process."""

from __future__ import annotations

import os

MARK = "XTOKEN_ATTEMPT"
"""Environment variable of every supervised process and its children: the worker and its attempt."""


def supervised() -> bool:
    """Return whether a supervisor has started this process."""
    return MARK in os.environ
