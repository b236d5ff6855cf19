"""`xtoken store`: a teacher's output, computed once and read by later runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtoken_services.cli.options import JsonOption, RankOption, SetOption, exit_as, set_up_logging

if TYPE_CHECKING:
    from xtoken_core.config import RunSpec
    from xtoken_core.teacher_store.store import TeacherStore

store_app = typer.Typer(name="store", help="Store a teacher's output, for runs without it.", no_args_is_help=True)

StoreArgument = Annotated[str, typer.Argument(metavar="DIR", help="The store's directory or address.")]
DAMAGED = 1


@store_app.callback()
def store() -> None:
    """Store a teacher's output, for runs without it."""


@store_app.command()
def build(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run's specification.")],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="The store: a directory, or an address of fsspec.",
            show_default="teacher.store of the run",
        ),
    ] = None,
    teacher: Annotated[
        int | None, typer.Option("--teacher", min=0, help="The teacher's number.", show_default="the only one")
    ] = None,
    settings: SetOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every record that the run needs, and compute damaged ones again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be computed, and start nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a teacher over a run's text, once, and store its hidden states or largest logits.

    The run file says which (teacher.content). Rerun the same command to resume, or to add what is missing. A run with
    teacher.store = DIR then has no teacher process.
    """
    from xtoken_core.errors import ConfigError
    from xtoken_services.common.run.defaults import load_run
    from xtoken_services.common.stores.store_build import build_spec, teacher_number

    run, notes = load_run(run_file, settings or ())
    target = _absolute(out) or run.teacher[teacher_number(run, teacher)].store
    if target is None:
        raise ConfigError("--out: name the directory of the store, or set teacher.store in the run file")
    spec = build_spec(run, teacher, target)
    if dry_run:
        _print(_plan_of(spec, target, run), as_json=as_json)
        return
    for note in notes if not as_json else ():
        typer.echo(f"default: {note}")
    from xtoken_services.supervisor.launch_check import check_launch
    from xtoken_services.supervisor.local_run import run_to_end
    from xtoken_services.supervisor.store_build import store_build

    check_launch(spec)
    exit_as(run_to_end(store_build(spec, target, run=run, verify=verify), as_json=as_json))
    from xtoken_core.teacher_store.store import TeacherStore

    _print(_summary_of(TeacherStore.open(target)), as_json=as_json)


@store_app.command()
def show(directory: StoreArgument, as_json: JsonOption = False) -> None:
    """Show what a store was built from, and how much it holds."""
    from xtoken_core.teacher_store.store import TeacherStore

    opened = TeacherStore.open(directory)
    _print(_summary_of(opened) | opened.identity.model_dump(mode="json"), as_json=as_json)


@store_app.command()
def check(directory: StoreArgument, as_json: JsonOption = False) -> None:
    """Read every record of a store, and name those that are damaged; the exit status is 1 if there are any."""
    from xtoken_core.teacher_store.store import TeacherStore

    opened = TeacherStore.open(directory)
    damaged = opened.damaged(sorted(opened.entries))
    shown: dict[str, Any] = _summary_of(opened) | {"damaged": len(damaged)}
    if as_json:
        shown["errors"] = list(damaged.values())
    _print(shown, as_json=as_json)
    for error in damaged.values() if not as_json else ():
        typer.echo(f"error: {error}", err=True)
    if damaged:
        raise typer.Exit(DAMAGED)


@store_app.command(hidden=True)
def write(
    run_file: Annotated[Path, typer.Argument(metavar="RESOLVED.json", help="The build, resolved.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="The store.")],
    rank: RankOption = 0,
) -> None:
    """Write one rank's part of a store: a process that `xtoken store build` starts."""
    set_up_logging()
    from xtoken_services.teacher.store_writer import work

    work(run_file, out, rank=rank)


def _plan_of(spec: RunSpec, target: str, run: RunSpec) -> dict[str, Any]:
    """Return the records, sizes and identity of a build, without starting it or writing into its directory."""
    import tempfile

    from xtoken_core.teacher_store.files import open_files
    from xtoken_core.teacher_store.identity import identity_of
    from xtoken_core.teacher_store.shards import MANIFEST
    from xtoken_core.teacher_store.store import TeacherStore, numpy_dtype
    from xtoken_services.common.run.resolve import resolve_run
    from xtoken_services.common.stores.store_build import as_part_of
    from xtoken_services.common.stores.store_records import records_of
    from xtoken_services.common.stores.teacher_stores import skip_condition

    with tempfile.TemporaryDirectory(prefix="xtoken-") as directory:
        elsewhere = spec.model_copy(update={"output": Path(directory) / "output"})
        resolved = as_part_of(resolve_run(elsewhere), run)
    identity = identity_of(resolved, 0)
    wanted = list(records_of(resolved))
    missing = len(wanted)
    if MANIFEST in open_files(target).names():
        opened = TeacherStore.open(target)
        opened.identity.check(identity, target)
        missing = len(opened.missing(wanted, skip_condition(resolved, 0)))
    return {
        "store": target,
        "content": identity.content,
        "records": len(wanted),
        "missing": missing,
        "bytes_per_token_uncompressed": identity.width * numpy_dtype(identity).itemsize,
    }


def _summary_of(opened: TeacherStore) -> dict[str, Any]:
    tokens, nbytes = opened.tokens, opened.nbytes
    return {
        "store": opened.files.name,
        "content": opened.identity.content,
        "records": len(opened.entries),
        "skipped": len(opened.skipped.keys() - opened.entries.keys()),
        "tokens": tokens,
        "bytes": nbytes,
        "bytes_per_token": round(nbytes / tokens, 2) if tokens else None,
    }


def _print(values: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(values))
        return
    width = max(map(len, values))
    for name, value in values.items():
        typer.echo(f"{name:{width}}  {value}")


def _absolute(store: str | None) -> str | None:
    return store if store is None or "://" in store else str(Path(store).absolute())
