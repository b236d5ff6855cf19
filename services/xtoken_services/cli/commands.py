"""Commands without a group: to begin a run, to serve its queue as a worker, to export it, and the control plane."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from xtoken_services.cli.options import JsonOption, LossOption, RankOption, set_up_logging, worker_command
from xtoken_services.common.processes.progress import spinner

if TYPE_CHECKING:
    from xtoken_services.common.processes.worker import QueueLink


@worker_command
def collator(link: QueueLink, name: str | None) -> None:
    """Tokenize and align a run's text."""
    from xtoken_services.collator.main import work

    work(link, name=name or "collator-0")


@worker_command
def rollout(link: QueueLink, name: str | None, rank: RankOption = 0) -> None:
    """Complete a run's prompts with the student's current weights."""
    from xtoken_services.rollout.main import work

    work(link, rank=rank, name=name)


@worker_command
def teacher(
    link: QueueLink,
    name: str | None,
    teacher: Annotated[int, typer.Option("--teacher", min=0, help="The teacher's number in the run.")] = 0,
    rank: RankOption = 0,
) -> None:
    """Compute a teacher's logits for the trainer of one rank."""
    from xtoken_services.teacher.main import work

    work(link, teacher=teacher, rank=rank, name=name)


@worker_command
def trainer(link: QueueLink, name: str | None, rank: RankOption = 0, loss: LossOption = None) -> None:
    """Train the student, resuming from the run's newest checkpoint if there is one."""
    from xtoken_services.trainer.main import work

    work(link, rank=rank, name=name, custom_loss=loss)


def init(
    student: Annotated[Path | None, typer.Option("--student", help="The student's directory.")] = None,
    teacher: Annotated[Path | None, typer.Option("--teacher", help="The teacher's directory.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="The text to train on.")] = None,
    out: Annotated[Path, typer.Option("--out", help="The run file; it must not exist.")] = Path("run.toml"),
    as_json: JsonOption = False,
) -> None:
    """Write a commented run file from the models and the text below this directory.

    Of the models, the one with the most weights is the teacher and the one with the fewest the student; of the text
    files, the largest is taken. Options name others. Directories of runs are passed over, and exports while there are
    enough other models.
    """
    from xtoken_core.errors import ConfigError
    from xtoken_services.cli.starter import find_inputs, starter_text

    if out.exists():
        raise ConfigError(f"{out} exists already: choose another file with --out, or remove it")
    inputs = find_inputs(out.resolve().parent, student=student, teacher=teacher, data=data)
    try:
        out.write_text(starter_text(inputs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps({"file": str(out), **asdict(inputs)}, indent=2))
        return
    for name, path in (("student", inputs.student), ("teacher", inputs.teacher), ("data", inputs.data)):
        typer.echo(f"{name}: {path}")
    typer.echo(
        f"wrote {out}: see what it amounts to with `xtoken run {out} --dry-run`, start it with `xtoken run {out}`"
    )


def export(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The run's directory.")],
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, metavar="N", help="Step of the checkpoint.", show_default="the newest"),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint of the best evaluation (eval.keep_best).")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Directory to write the model to; it must not exist.",
            show_default="OUTPUT/model-step-NNNNNNNN",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a model from a run's checkpoint.

    The run may be running, stopped or failed, and no GPU is needed. The model directory has the files that a completed
    run writes to OUTPUT/model: weights, tokenizer, and a model card with the metrics up to the checkpoint's step.
    """
    from xtoken_services.trainer.export_checkpoint import choose, step_of_best

    step = step_of_best(output, step) if best else step
    choose(output, step, to)
    with spinner("reading the checkpoint and writing the model", quiet=as_json):
        from xtoken_services.trainer.export_checkpoint import export_checkpoint

        exported = export_checkpoint(output, step, to)
    document = {"directory": str(exported.target), "step": exported.step}
    line = f"{exported.target}: after {exported.step} of {exported.run.steps} steps"
    typer.echo(json.dumps(document) if as_json else line)


def control(
    host: Annotated[
        str, typer.Option(help="Address to listen at; any but a loopback address needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8400,
    runs_dir: Annotated[
        Path, typer.Option(help="Directory of the database and of all runs; nothing is written elsewhere.")
    ] = Path("runs"),
    root: Annotated[
        list[Path] | None,
        typer.Option(
            "--root",
            metavar="DIR",
            help="Directory that runs may read; repeatable. Relative paths are below the first.",
            show_default=".",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="The file (0600) with the token that requests must carry; created if it is missing.",
            show_default="~/.config/xtoken/control.token",
        ),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", metavar="HOST", help="Host name that requests may use; repeatable.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="Address of a proxy that names its clients in X-Forwarded-For; repeatable.",
            show_default="none",
        ),
    ] = None,
    on_exit: Annotated[
        Literal["leave", "stop"], typer.Option("--on-exit", help="What happens to its runs when it exits.")
    ] = "leave",
) -> None:
    """Serve the control plane.

    Starts, lists, shows, stops and resumes runs over HTTP. Runs continue when it exits, and a control plane started for
    the same directory takes them over. While none is running, no failed worker is restarted.
    """
    set_up_logging()
    from xtoken_services.control.serve import serve

    serve(
        host,
        port,
        runs_dir,
        roots=root or [Path()],
        token_file=token_file,
        names=name or (),
        proxies=trusted_proxy or (),
        stop_on_exit=on_exit == "stop",
    )
