"""Telling somebody at a terminal that work goes on, and how far it is: on standard error, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Told = Callable[[int, int | None], None]
"""How much is done, and of how much; None while that is not known."""


@contextmanager
def busy(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Say what is done while it is done, where its length cannot be told."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with console.status(text):
        yield


@contextmanager
def counted(text: str, *, quiet: bool = False) -> Iterator[Told]:
    """A bar that shows how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task(text, total=None)

        def tell(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield tell
