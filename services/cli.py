"""The `xtoken` command. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.common.align_cli import align_app
from services.common.projection_cli import projection_app
from services.control.cli import ControlTokenOption, JsonOption, runs_app, token_in
from services.queue.cli import queue_app
from services.trainer.export_cli import export
from xtoken_core.errors import XtokenError

if TYPE_CHECKING:
    from services.common.worker import QueueLink

DEBUG_VARIABLE = "XTOKEN_DEBUG"
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

app.add_typer(runs_app, name="runs")
app.add_typer(queue_app, name="queue")
app.add_typer(align_app, name="align")
app.add_typer(projection_app, name="projection")

QueueOption = Annotated[
    str, typer.Option("--queue", metavar="ADDR", help="The queue's address: ipc://PATH or tcp://127.0.0.1:PORT.")
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="The file with the queue's token, for a tcp address.", show_default=False),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="DIR", help="The directory of keys, for a tcp address beyond loopback.", show_default=False
    ),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="The worker's name in the queue.", show_default="by its kind and place")
]
IncarnationOption = Annotated[
    int | None,
    typer.Option(
        "--incarnation",
        help="Which start of this worker it is; a higher one replaces a lower.",
        show_default="the time",
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", min=0.1, metavar="SECONDS", help="How long the queue may leave it unanswered.")
]
RankOption = Annotated[int, typer.Option("--rank", min=0, help="The rank of the trainer that it is, or works for.")]


class OnExit(StrEnum):
    """What becomes of a control plane's runs when it is told to leave."""

    LEAVE = "leave"
    STOP = "stop"


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


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the models, runs and report go.")] = Path("demo-out"),
) -> None:
    """Show the whole thing, small.

    Trains a teacher, distils it into a student with another tokenizer, and tells what the student has gained.
    """
    from services.demo.run import run_demo

    run_demo(out)


@app.command()
def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification.")],
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="URL", help="A control plane to run it on.", show_default="one of its own"),
    ] = None,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Distil, and watch it.

    Shows the run's progress until it ends. Ctrl-C stops it in order, a second one at once; the same command goes on
    from the last checkpoint. Without --control everything ends with this command, however it ends.
    """
    from xtoken_core.config import load_run_spec

    spec = load_run_spec(run_file)
    from services.control.client import run_at, run_in_place

    if control:
        outcome = run_at(control, spec, token=token_in(token_file), as_json=as_json)
    else:
        outcome = run_in_place(spec, as_json=as_json)
    if outcome.error:
        _complain(outcome.error)
    raise typer.Exit(outcome.exit_code)


@app.command()
def collator(
    queue: QueueOption,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: TokenFileOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Tokenize and align a run's text."""
    _log()
    link = _link(queue, token_file, keys, incarnation, patience)
    from services.collator.main import work

    work(link, name=name or "collator-0")


@app.command()
def teacher(
    queue: QueueOption,
    teacher: Annotated[int, typer.Option("--teacher", min=0, help="Which of the run's teachers it is.")] = 0,
    rank: RankOption = 0,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: TokenFileOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Serve a teacher's logits to one trainer."""
    _log()
    link = _link(queue, token_file, keys, incarnation, patience)
    from services.teacher.main import work

    work(link, teacher=teacher, rank=rank, name=name)


@app.command()
def trainer(
    queue: QueueOption,
    rank: RankOption = 0,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: TokenFileOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Train the student.

    It goes on from the run's newest checkpoint if there is one.
    """
    _log()
    link = _link(queue, token_file, keys, incarnation, patience)
    from services.trainer.main import work

    work(link, rank=rank, name=name)


app.command()(export)


@app.command()
def control(
    host: Annotated[
        str, typer.Option(help="Where to listen; other than at a loopback address only with --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8400,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are remembered and written; nowhere else.")] = Path("runs"),
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", metavar="DIR", help="Where runs may read; may be given again.", show_default="."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="The file (0600) with the token that requests must carry; made if it is missing.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="HOST", help="A host name it may be asked for under; may be given again."),
    ] = None,
    on_exit: Annotated[
        OnExit, typer.Option("--on-exit", help="What becomes of its runs when it is told to leave.")
    ] = OnExit.LEAVE,
) -> None:
    """Serve the control plane.

    Starts, lists, shows, stops and resumes runs over HTTP. Its runs outlive it: a control plane started for the same
    directory finds them again. While none lives, nothing is restarted.
    """
    _log()
    from services.control.serve import serve

    serve(
        host, port, runs_dir, roots=root or [Path()], token_file=token_file, names=name or (),
        stop_on_exit=on_exit == OnExit.STOP,
    )  # fmt: skip


@app.command()
def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    import json
    from importlib.metadata import version as version_of

    found = version_of("xtoken")
    typer.echo(json.dumps({"version": found}) if as_json else found)


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


def _log() -> None:
    from services.common.logs import set_up

    set_up(debug=bool(os.environ.get(DEBUG_VARIABLE)))


def _link(
    queue: str, token_file: Path | None, keys: Path | None, incarnation: int | None, patience: float
) -> QueueLink:
    """The way to a queue; an address that cannot be right is refused before anything heavy is loaded."""
    from services.common.worker import QueueLink
    from xtoken_core.data_plane.address import Address, read_token

    address = Address.parse(queue, token_file, keys)
    if address.token_file is not None and address.token_file.exists():  # a queue that starts later makes it
        read_token(address.token_file)
    return QueueLink(queue, token_file, keys, incarnation, patience)


if __name__ == "__main__":
    main()
