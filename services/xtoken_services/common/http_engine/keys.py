"""Keys of servers: from a file or the environment, never from a run file."""

from __future__ import annotations

import os
from pathlib import Path

from xtoken_core.errors import ConfigError, InputError, os_errors_as
from xtoken_core.regular_files import read_regular
from xtoken_services.common.files.allowed_paths import check_allowed

VARIABLE = "XTOKEN_ENGINE_KEY"
MAX_KEY = 4096


def read_key(file: Path | None, field: str) -> str | None:
    """Return the key of a server; None without one.

    Args:
        file: The file that the settings name; None: the environment decides.
        field: The setting that names it, for errors.

    Raises:
        InputError: The file cannot be read.
        ConfigError: It holds no key. No message shows any of it.
    """
    if file is None:
        source, key = f"the environment variable {VARIABLE}", os.environ.get(VARIABLE, "").strip()
        if not key:
            return None
    else:
        source = f"{field}: {file}"
        with os_errors_as(InputError, f"{field}: cannot read the key in {file}"):
            key = read_regular(check_allowed(file, field), MAX_KEY).decode("ascii", errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source} holds no key: it takes one line of printable characters without spaces")
    return key
