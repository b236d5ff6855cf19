"""The user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the user's cache directory: `xtoken` below `XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xtoken"
