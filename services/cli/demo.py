"""`xtoken demo`: a whole run with tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the models, runs and report go.")] = Path("demo-out"),
) -> None:
    """Show the whole thing, small.

    Trains a teacher, distils it into a student with another tokenizer, and tells what the student has gained.
    """
    from services.demo.run import run_demo

    run_demo(out)
