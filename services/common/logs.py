"""Logging of a process: one line per event, to standard error."""

from __future__ import annotations

import logging
import time

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up(*, debug: bool = False) -> None:
    """Log to standard error with UTC times; `debug` adds the details."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter(FORMAT, datefmt="%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.getLogger("torch").setLevel(logging.ERROR)  # hides advice that is no use to a user
    root = logging.getLogger("xtoken")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(logging.DEBUG if debug else logging.INFO)
