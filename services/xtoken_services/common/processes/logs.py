"""Logging of a process: one line per event, to standard error."""

from __future__ import annotations

import logging
import os
import time
import warnings

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


LIBRARIES = ("torch", "torch.fx", "transformers", "tokenizers", "huggingface_hub")
"""Loggers of libraries; torch sets its own level again when some of its parts are imported, but not that of `fx`."""
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
"""Variables that libraries read when they are imported, which is later."""


def set_up(*, debug: bool = False) -> None:
    """Log to standard error with UTC times; `debug` adds the details."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter(FORMAT, datefmt="%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    if not debug:
        _quiet_libraries()
    root = logging.getLogger("xtoken")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(logging.DEBUG if debug else logging.INFO)


def _quiet_libraries() -> None:
    """Hide advice and progress bars of libraries, which name functions that no user of this program calls."""
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=rf"{name}(\..*)?$")
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
