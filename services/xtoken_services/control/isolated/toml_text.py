"""Parsing of TOML from another user in a child process: some texts of 40 kB take the parser half a minute.

A request is `{"text": ...}`, its result the document, in which a date is a string.
"""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Iterable
from typing import Any

from xtoken_core.errors import ConfigError
from xtoken_core.regular_files import MIB
from xtoken_services.common.processes.child_process import ChildError, Progress, answer_requests, ask_child

MAX_BYTES = 64 << 10
MAX_DEPTH = 16
MAX_VALUES = 4096
MAX_INTEGER = 2**63
DEADLINE_S = 5.0
MEMORY = 512 * MIB
MAX_PROCESSES = 2
WAIT_S = 1.0
"""Seconds to wait for one of the processes to end."""
_slots = threading.BoundedSemaphore(MAX_PROCESSES)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the document of a TOML text; a date becomes a string.

    Raises:
        ConfigError: The text is not TOML, or exceeds a limit of size, nesting or time.
    """
    data = text.encode("utf-8", "replace")  # a form may hold halves of surrogate pairs
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the run file is larger than {MAX_BYTES} bytes")
    if not _slots.acquire(timeout=WAIT_S):
        raise ConfigError("too many run files are being read: retry in a moment")
    try:
        document: dict[str, Any] = ask_child(__name__, {"text": data.decode()}, silence_s=DEADLINE_S, memory=MEMORY)
    except ChildError as error:
        raise ConfigError(f"the run file cannot be parsed: {error}") from error
    finally:
        _slots.release()
    return document


def check_document(document: dict[str, Any]) -> None:
    """Refuse a document that is nested too deeply, too large, or holds integers beyond 64 bits.

    Raises:
        ValueError: The text states which.
    """
    level: list[Any] = [document]
    values = 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if type(value) is int and abs(value) >= MAX_INTEGER:
                raise ValueError("an integer does not fit 64 bits")
            inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
            below += inner if isinstance(value, (dict, list)) else ()
        values += len(below)
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if not below:
            return
        level = below
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def main(request: dict[str, Any], _: Progress) -> dict[str, Any]:
    """Parse the text of a request."""
    try:
        document = tomllib.loads(request["text"])
        check_document(document)
    except RecursionError as error:
        raise ConfigError("Invalid TOML: nested too deeply") from error
    except ValueError as error:  # of tomllib; of int() for thousands of digits
        raise ConfigError(f"Invalid TOML: {str(error)[:500]}") from error
    return document


if __name__ == "__main__":
    answer_requests(main)
