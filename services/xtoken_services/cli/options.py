"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints
from urllib.parse import urlsplit

import typer

from xtoken_core.errors import ConfigError
from xtoken_services.common.files.private_files import control_token_file

if TYPE_CHECKING:
    from xtoken_services.control.client import ControlClient
    from xtoken_services.supervisor.run_record import RunResult

DEBUG_VARIABLE = "XTOKEN_DEBUG"
DEFAULT_URL = "http://127.0.0.1:8400"
URL_VARIABLE = "XTOKEN_CONTROL"
TOKEN_VARIABLE = "XTOKEN_CONTROL_TOKEN_FILE"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; for a stream, one object a line.")]

ControlOption = Annotated[
    str, typer.Option("--control", metavar="URL", envvar=URL_VARIABLE, help="The control plane.", rich_help_panel=None)
]
ControlTokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=TOKEN_VARIABLE,
        help="The file with the control plane's token; at a loopback address this user's own, if left out.",
    ),
]

QueueOption = Annotated[
    str, typer.Option("--queue", metavar="ADDR", help="The queue's address: ipc://PATH or tcp://HOST:PORT.")
]
QueueTokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="The file with the queue's token, for loopback TCP.")
]
KeysOption = Annotated[
    Path | None, typer.Option("--keys", metavar="DIR", help="The directory of keys, for any other TCP address.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="The worker's name in the queue.", show_default="from its kind and rank")
]
IncarnationOption = Annotated[
    int | None,
    typer.Option(
        "--incarnation",
        help="Number of this start of the worker; a higher one replaces a lower one.",
        show_default="the time",
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", min=0.1, metavar="SECONDS", help="How long to retry an unanswered request.")
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss", metavar="MODULE:CLASS", help='The class of loss.mode = "custom", which is imported and run.'
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Replace a setting of the run file; repeatable."),
]
RankOption = Annotated[int, typer.Option("--rank", min=0, help="The trainer's rank.")]


def control_plane_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a control plane's client to a command.

    The command takes a connected client and `as_json`; `--control`, `--token-file` and `--json` come from here.

    Args:
        command: A function of `client`, its own parameters and `as_json`.
    """

    def run(*, control: str, token_file: Path | None, as_json: bool, **values: Any) -> None:
        with connect(control, token_file) as client:
            command(client=client, as_json=as_json, **values)

    shared = {
        "control": (ControlOption, DEFAULT_URL),
        "token_file": (ControlTokenOption, None),
        "as_json": (JsonOption, False),
    }
    return _with_options(command, run, ("client", "as_json"), shared)


def worker_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a worker to a command: its queue and what identifies it there.

    The command takes the link to the queue and the worker's name. The address is checked, and logging set up, before
    the command imports anything heavy.

    Args:
        command: A function of `link`, `name` and its own parameters.
    """

    def run(
        *,
        queue: str,
        name: str | None,
        incarnation: int | None,
        token_file: Path | None,
        keys: Path | None,
        patience: float,
        **values: Any,
    ) -> None:
        from xtoken_core.data_plane.address import Address, read_token
        from xtoken_services.common.processes.worker import QueueLink

        set_up_logging()
        address = Address.parse(queue, token_file, keys)
        if address.token_file is not None and address.token_file.exists():  # a queue that starts later creates it
            read_token(address.token_file)
        command(link=QueueLink(queue, token_file, keys, incarnation, patience), name=name, **values)

    shared = {
        "queue": (QueueOption, inspect.Parameter.empty),
        "name": (NameOption, None),
        "incarnation": (IncarnationOption, None),
        "token_file": (QueueTokenOption, None),
        "keys": (KeysOption, None),
        "patience": (PatienceOption, 30.0),
    }
    return _with_options(command, run, ("link", "name"), shared)


def _with_options(
    command: Callable[..., None], run: Callable[..., None], given: Sequence[str], shared: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """Return `run` with the command's name, text and own parameters, and with the annotations and defaults of `shared`.

    Typer builds a command line from the signature. `given` are the parameters that `run` fills in.
    """
    # Their types are imported for type checking only, so that `--help` loads nothing heavy.
    hints = get_type_hints(command, localns={"ControlClient": Any, "QueueLink": Any}, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter.replace(annotation=hints[name], kind=keyword)
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in given
    ]
    for name, (annotation, default) in shared.items():
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    functools.update_wrapper(run, command)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # type: ignore[attr-defined]  # or Typer would read the signature of the command itself
    return run


def connect(url: str, token_file: Path | None) -> AbstractContextManager[ControlClient]:
    """Return a client of a control plane, which the context closes.

    Raises:
        ConfigError: The token file cannot be read.
    """
    token = read_control_token(token_file, url)
    from xtoken_services.control.client import ControlClient

    return closing(ControlClient(url, token))


def read_control_token(file: Path | None, url: str) -> str | None:
    """Return the token for a control plane; None without one.

    Args:
        file: File with the token; None: this user's own, which is sent to loopback addresses only.
        url: The control plane.

    Raises:
        ConfigError: The file cannot be read.
    """
    if file is None:
        file = control_token_file()
        if urlsplit(url).hostname not in LOOPBACK or not file.exists():
            return None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it holds no text"
        raise ConfigError(f"cannot read the token file {file}: {reason}") from error


def exit_as(result: RunResult) -> None:
    """Print a run's error, and exit if it did not complete.

    Raises:
        typer.Exit: With the run's exit status.
    """
    if result.error:
        typer.echo(f"error: {result.error}", err=True)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def set_up_logging() -> None:
    """Log to standard error, with debug messages if `--debug` was given."""
    from xtoken_services.common.processes.logs import set_up

    set_up(debug=bool(os.environ.get(DEBUG_VARIABLE)))


StudentOption = Annotated[Path, typer.Option("--student", help="The student's directory (model or tokenizer).")]
TeacherOption = Annotated[Path, typer.Option("--teacher", help="The teacher's directory.")]
SpecialTokensOption = Annotated[
    list[str] | None,
    typer.Option(
        "--special-token",
        metavar="STUDENT=TEACHER",
        help="Pair two special tokens, as teacher.special_tokens does; may be repeated.",
    ),
]
