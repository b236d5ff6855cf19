"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from xtoken_core.errors import ConfigError

DEBUG_VARIABLE = "XTOKEN_DEBUG"
DEFAULT_URL = "http://127.0.0.1:8400"
URL_VARIABLE = "XTOKEN_CONTROL"
TOKEN_VARIABLE = "XTOKEN_CONTROL_TOKEN_FILE"

ControlOption = Annotated[
    str, typer.Option("--control", metavar="URL", envvar=URL_VARIABLE, help="The control plane.", rich_help_panel=None)
]
ControlTokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar=TOKEN_VARIABLE, help="The file with the control plane's token.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; an object a line where it goes on.")]


def token_in(file: Path | None) -> str | None:
    """The token in a file; None if there is no file.

    Raises:
        ConfigError: It cannot be read.
    """
    if file is None:
        return None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it holds no text"
        raise ConfigError(f"cannot read the token file {file}: {reason}") from error


def set_up_logging() -> None:
    """Log to standard error, with debug messages if `--debug` was given."""
    from services.common.logs import set_up

    set_up(debug=bool(os.environ.get(DEBUG_VARIABLE)))
