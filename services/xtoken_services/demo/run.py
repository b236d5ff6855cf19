"""The whole demo, from the text to the report."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from xtoken_core.config import load_run_spec
from xtoken_core.errors import InputError, XtokenError
from xtoken_services.demo.corpus import write_corpus
from xtoken_services.demo.report import Run, read_run, table, write_report
from xtoken_services.demo.specs import (
    CROSS_ENTROPY,
    DISTILLED,
    STUDENT,
    STUDENT_TRAINING,
    TEACHER,
    TEACHER_TRAINING,
    UNTRAINED_TEACHER,
    Training,
    write_run_files,
)

_MARK = ".xtoken-demo"
_NAMES = {TEACHER: "teacher", CROSS_ENTROPY: "student, cross-entropy only", DISTILLED: "student, distilled"}


def run_demo(
    out: Path,
    *,
    console: Console | None = None,
    teacher: Training = TEACHER_TRAINING,
    student: Training = STUDENT_TRAINING,
) -> None:
    """Create text, tokenizers and models, train the teacher, then the student twice, compare, and write a report.

    Leaves in `out`: `report.html`, `table.txt`, the `teacher`, the untrained `student`, all runs' files and
    directories, and with them the distilled student in `runs/distilled/model`. An earlier demo's files are replaced.

    Args:
        out: A directory that is missing, empty, or was created by the demo.
        console: Console for progress and table; standard output if left out.
        teacher: Training of the teacher; by default about two minutes on two cores.
        student: Training of both students; by default about a minute each.

    Raises:
        InputError: `out` has other files.
        XtokenError: A run failed or was stopped.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would take the cores from other processes
    console = console or Console()
    began = time.monotonic()
    prepare_directory(out)
    with _stage(console, "Text: the standard library's sources"):
        corpus = write_corpus(out / "corpus")
    console.print(f"  {corpus.train_bytes / 1e6:.1f} MB to train on, {corpus.heldout_bytes / 1e6:.1f} MB held out")
    with _stage(console, "Tokenizers: BPE over digits for the teacher, Unigram over whole numbers for the student"):
        from xtoken_services.demo.models import STUDENT_LAYERS, TEACHER_LAYERS, write_model
        from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer, training_texts

        texts = training_texts(corpus.train)
        train_teacher_tokenizer(texts, out / "tokenizers" / TEACHER)
        train_student_tokenizer(texts, out / "tokenizers" / STUDENT)
    with _stage(console, "Models with random weights"):
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        write_model(out / UNTRAINED_TEACHER, out / "tokenizers" / TEACHER, layers=TEACHER_LAYERS)
        write_model(out / STUDENT, out / "tokenizers" / STUDENT, layers=STUDENT_LAYERS)
    for name, file in write_run_files(out, teacher, student).items():
        with _stage(console, f"Run: {_NAMES[name]}"):
            _train(file)
            if name == TEACHER:
                shutil.copytree(out / "runs" / TEACHER / "model", out / TEACHER)
    _show(console, out, [read_run(title, out / "runs" / name) for name, title in _NAMES.items()])
    console.print(f"The demo took {time.monotonic() - began:.0f} s.")


def prepare_directory(out: Path) -> None:
    """Create the directory, and remove the files of an earlier demo.

    Raises:
        InputError: It has files that are not the demo's, or cannot be written.
    """
    try:
        if out.exists() and any(out.iterdir()):
            if not (out / _MARK).is_file():
                raise InputError(f"{out} is not empty and was not made by the demo: name another directory with --out")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARK).touch()
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}: name another directory with --out") from error


@contextmanager
def _stage(console: Console, title: str) -> Iterator[None]:
    console.print(f"[bold]{title}[/bold]")
    began = time.monotonic()
    yield
    console.print(f"  done in {time.monotonic() - began:.1f} s", style="dim")


def _train(run_file: Path) -> None:
    """Run one training to its end.

    Raises:
        XtokenError: It did not complete.
    """
    from xtoken_services.supervisor.local_run import run_locally

    result = run_locally(load_run_spec(run_file))
    if result.exit_code:
        error = XtokenError(result.error or f"the run {run_file.stem} was stopped: rerun `xtoken demo`")
        error.exit_code = result.exit_code
        raise error


def _show(console: Console, out: Path, runs: list[Run]) -> None:
    """Print the table, and write it and the report."""
    teacher, *students = runs
    console.print(table(runs))
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=120).print(table(runs))
    write_report(out / "report.html", teacher, students)
    gain = students[0].final["bits_per_byte"] - students[1].final["bits_per_byte"]
    console.print(
        f"Distillation {'saves' if gain >= 0 else 'costs'} {abs(gain):.3f} bits per byte, same data and same steps."
    )
    console.print(f"Report: {out / 'report.html'}\nModel:  {out / 'runs' / DISTILLED / 'model'}")
