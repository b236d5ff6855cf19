"""The `xtoken` command. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from services.cli.align import align_app
from services.cli.control import control
from services.cli.demo import demo
from services.cli.export import export
from services.cli.options import DEBUG_VARIABLE
from services.cli.projection import projection_app
from services.cli.queue import queue_app
from services.cli.run import run
from services.cli.runs import runs_app
from services.cli.version import version
from services.cli.workers import collator, teacher, trainer
from xtoken_core.errors import XtokenError

STATUS_VARIABLE = "XTOKEN_STATUS_FILE"
INTERRUPTED = 130

app = typer.Typer(
    name="xtoken",
    help="Distil a language model into a student that does not share its tokenizer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (demo, run, collator, teacher, trainer, export, control, version):
    app.command()(command)
app.add_typer(runs_app, name="runs")
app.add_typer(queue_app, name="queue")
app.add_typer(align_app, name="align")
app.add_typer(projection_app, name="projection")


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show tracebacks, and log more.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Read the options that all commands share."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def main() -> None:
    """Run a command; an expected failure becomes one line on standard error and the error's exit status."""
    status = _status_of(sys.argv[1:])
    _leave_status(status)
    sys.exit(status)


def _leave_status(status: int) -> None:
    """Write the exit status where the control plane asks for it: one that did not start this process cannot wait."""
    file = os.environ.get(STATUS_VARIABLE)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{status}\n", encoding="ascii")


def _status_of(arguments: list[str]) -> int:
    try:
        status = app(arguments, prog_name="xtoken", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        return _fail(error)
    return status if isinstance(status, int) else 0


def _fail(error: Exception) -> int:
    """Say what went wrong; returns the exit status."""
    show = getattr(error, "show", None)  # a mistake on the command line, which knows its usage line
    if show is not None:
        show()
        return int(getattr(error, "exit_code", 2))
    line = _expected(error)
    if line is None or os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    if line is not None:
        _complain(line)
    return int(getattr(error, "exit_code", 1))


def _expected(error: Exception) -> str | None:
    """The one line for a failure that is not a fault of the program's; None for one that is."""
    from xtoken_core.wire.errors import QueueError

    if isinstance(error, (XtokenError, QueueError)):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" while writing {error.filename}" if error.filename else ""
        return f"no space is left on the device{place}: free some and start again"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which not every command has
        said = str(error).partition(" Including")[0].partition("\n")[0]
        return f"{said} Lower train.micro_batch_tokens or workers.slots, or give teachers a GPU of their own"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return None


def _complain(line: str) -> None:
    typer.echo(f"error: {line}", err=True)
