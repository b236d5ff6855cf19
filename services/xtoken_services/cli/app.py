"""The `xtoken` command. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from xtoken_core.errors import XtokenError
from xtoken_services.cli.align import align_app
from xtoken_services.cli.chain import chain_app
from xtoken_services.cli.commands import collator, control, export, init, rollout, teacher, trainer
from xtoken_services.cli.data import data_app
from xtoken_services.cli.options import DEBUG_VARIABLE
from xtoken_services.cli.projection import projection_app
from xtoken_services.cli.queue import queue_app
from xtoken_services.cli.run import run
from xtoken_services.cli.runs import runs_app
from xtoken_services.cli.store import store_app

STATUS_VARIABLE = "XTOKEN_STATUS_FILE"
INTERRUPTED = 130
CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In the message of torch's error for memory of the host that cannot be had."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Directory for models, runs and report.")] = Path("demo-out"),
) -> None:
    """Run a small distillation from start to end.

    Trains a teacher, distils it into a student with another tokenizer, and reports what the student has gained.
    """
    typer.echo("The demo takes 3.5 to 5 minutes on two cores.")
    from xtoken_services.demo.run import run_demo

    run_demo(out)


COMMANDS = {
    command.__name__: command for command in (demo, init, run, collator, rollout, teacher, trainer, export, control)
}
GROUPS = {
    "runs": runs_app,
    "queue": queue_app,
    "data": data_app,
    "align": align_app,
    "projection": projection_app,
    "chain": chain_app,
    "store": store_app,
}
PROCESSES = ("queue", "collator", "rollout", "teacher", "trainer")


class CommandsInTwoParts(TyperGroup):
    """The commands' list, those that a run starts by itself apart."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the two parts of the list."""
        parts = {"Commands": False, "Processes of a run, which `xtoken run` starts by itself": True}
        rows = [(name, self.commands[name].get_short_help_str(formatter.width - 15)) for name in self.commands]
        for title, processes in parts.items():
            with formatter.section(title):
                formatter.write_dl([row for row in rows if (row[0] in PROCESSES) == processes])


def _print_version(requested: bool) -> None:
    if requested:
        from importlib import metadata

        typer.echo(metadata.version("xtoken"))
        raise typer.Exit


def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show tracebacks and debug messages.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Apply the options that all commands share."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def app_of(names: Collection[str]) -> typer.Typer:
    """Return the application with some of its commands and groups."""
    made = typer.Typer(
        name="xtoken",
        cls=CommandsInTwoParts,
        help="Distil a language model into a student that does not share its tokenizer.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(options)
    for name, command in COMMANDS.items():
        if name in names:
            made.command()(command)
    for name, group in GROUPS.items():
        if name in names:
            made.add_typer(group, name=name)
    return made


app = app_of([*COMMANDS, *GROUPS])


def main() -> None:
    """Run a command, and print an expected failure as one line on standard error; exit with its status."""
    name_user()
    status = _run(sys.argv[1:])
    _write_status(status)
    sys.exit(status)


def name_user() -> None:
    """Set `LOGNAME` where the user id has no name, as in a container that is started with any id.

    torch asks for the user's name when it compiles a kernel, and fails with a `KeyError` if there is none.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"


def _write_status(status: int) -> None:
    """Write the exit status to the file that a supervisor has named.

    The kernel reports an exit status only to the parent process, which may be gone when another supervisor takes over.
    """
    file = os.environ.get(STATUS_VARIABLE)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{status}\n", encoding="ascii")


def _run(arguments: list[str]) -> int:
    first = arguments[:1]  # parsing needs the others for help and for mistakes only, and making all takes 0.1 s
    chosen = app_of(first) if first and first[0] in (*COMMANDS, *GROUPS) else app
    try:
        status = chosen(arguments, prog_name="xtoken", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        return _fail(error)
    return status if isinstance(status, int) else 0


def _fail(error: Exception) -> int:
    """Print an error and return its exit status."""
    show = getattr(error, "show", None)  # a usage error, which prints the usage line too
    if show is not None:
        show()
        return int(getattr(error, "exit_code", 2))
    line = _one_line(error)
    if line is None or os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    if line is not None:
        typer.echo(f"error: {line}", err=True)
    return int(getattr(error, "exit_code", 2 if _is_out_of_memory(error) else 1))


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, a GPU's or the host's: the same process would end in the same way again."""
    # By name and text, as not every command imports torch.
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or CPU_ALLOCATOR in str(error)


def _one_line(error: Exception) -> str | None:
    """Return the line for an expected error; None for an error in the program."""
    from xtoken_core.wire.errors import QueueError

    if isinstance(error, (XtokenError, QueueError)):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        file = f" while writing {error.filename}" if error.filename else ""
        return f"no space is left on the device{file}: free some and start again"
    if _is_out_of_memory(error):
        reason = str(error).partition(" Including")[0].partition("\n")[0] or "no memory is left on this machine."
        reason = reason[max(0, reason.find(CPU_ALLOCATOR)) :]
        return f"{reason} Lower train.micro_batch_tokens or workers.slots, or give teachers a GPU of their own"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return None
