"""Spinner and progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressCallback = Callable[[int, int | None], None]
"""Takes the amount done and the total; None while that is not known."""


@contextmanager
def spinner(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a spinner, for work of unknown length."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with console.status(text):
        yield


@contextmanager
def progress_bar(text: str, *, quiet: bool = False) -> Iterator[ProgressCallback]:
    """Show a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task(text, total=None)

        def update(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield update
