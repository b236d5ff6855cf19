"""`xtoken demo`: a whole distillation with tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", help="Directory for models, runs and report.")] = Path("demo-out"),
) -> None:
    """Run a small distillation from start to end.

    Trains a teacher, distils it into a student with another tokenizer, and reports what the student has gained.
    """
    from xtoken_services.demo.run import run_demo

    run_demo(out)
