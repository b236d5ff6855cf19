"""`xtoken export`: a model directory from a checkpoint of a run, on the CPU, without a queue or a run.

Selecting the checkpoint needs no torch: what cannot be exported is refused before anything heavy is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.allowed_paths import Roots, confined
from services.common.resume import CHECKPOINTS, RESOLVED
from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.errors import InputError, OutputError

if TYPE_CHECKING:
    from torch import Tensor

    from services.trainer.checkpoint import Cursor

NAME = re.compile(r"step-([0-9]{8})")


@dataclass(frozen=True)
class Chosen:
    """What is exported.

    Attributes:
        run: The run, as it was resolved.
        checkpoint: The checkpoint.
        step: The step it stands at.
        target: Where the model goes; nothing is there.
    """

    run: ResolvedRun
    checkpoint: Path
    step: int
    target: Path


def choose(output: Path, step: int | None = None, to: Path | None = None) -> Chosen:
    """Find a checkpoint in a run's directory.

    Args:
        output: The run's directory, which need not be where it was when the run was made.
        step: The checkpoint's step; None: the newest.
        to: Where the model goes; None: beside the checkpoints, under its step's name.

    Raises:
        InputError: It is no run's directory, or has no such checkpoint.
        OutputError: There is something where the model would go.
        ConfigError: A path leads out of the control plane's roots, or the run is of another version.
    """
    confined(output, "OUTPUT")
    file = output / RESOLVED
    try:
        run = parse_resolved_run(file.read_bytes(), source=str(file))
    except OSError as error:
        raise InputError(f"{output} is no run's directory: cannot read {file}: {error.strerror}") from error
    found = checkpoints_in(output / CHECKPOINTS)
    if not found:
        raise InputError(
            f"{output} holds no checkpoint yet: a run writes one every train.checkpoint_every = "
            f"{run.spec.train.checkpoint_every} steps, and when it is stopped"
        )
    at = max(found) if step is None else step
    if at not in found:
        raise InputError(
            f"{output} holds no checkpoint of step {at}: there are those of step {', '.join(map(str, sorted(found)))}"
        )
    target = to if to is not None else output / f"model-{found[at].name}"
    check_target(target)
    return Chosen(run, found[at], at, target)


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """The checkpoints in a directory, by step.

    Raises:
        InputError: It cannot be listed.
    """
    try:
        named = {path: NAME.fullmatch(path.name) for path in directory.iterdir()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot list the checkpoints in {directory}: {error.strerror}") from error
    return {int(match[1]): path for path, match in named.items() if match}


def check_target(target: Path) -> None:
    """Refuse a place that is taken, or that this process may not write.

    Raises:
        OutputError: There is something.
        OutsideError: It leads out of the control plane's roots.
    """
    roots = Roots.of_environment()
    if roots is not None:
        roots.check(target, "--to", write=True)
    if os.path.lexists(target):
        raise OutputError(f"{target} is there already: remove it, or name another directory with --to")


def export_checkpoint(output: Path, step: int | None = None, to: Path | None = None) -> Chosen:
    """Make a model directory from a checkpoint, whole or not at all; the run may go on meanwhile.

    Args:
        output: As for `choose`.
        step: Likewise.
        to: Likewise.

    Returns:
        What was exported, and where to.

    Raises:
        InputError: The checkpoint, the student's model or its tokenizer cannot be read.
        ConfigError: As `choose`; also if the checkpoint is another run's.
        OutputError: The model cannot be written.
    """
    import torch

    from services.common.tokenizers import load_tokenizer
    from services.trainer.export import export_student
    from services.trainer.student import load_student

    spec = choose(output, step, to).run.spec
    trained = {"compile": False, "checkpoint_activations": False, "blockwise_head": False}  # nothing is computed here
    plain = spec.model_copy(update={"student": spec.student.model_copy(update=trained)})
    student = load_student(plain, torch.device("cpu"))
    tokenizer = load_tokenizer(spec.student.tokenizer_dir, "student")
    state = {f"model.{name}": weight.detach() for name, weight in student.trained.items()}
    chosen, cursor = read_checkpoint(output, step, to, state)
    student.publish()
    whole = student.whole(plain)
    assert whole is not None
    export_student(chosen.target, chosen.run, cursor, whole, tokenizer, output=output, replaces=False)
    return chosen


def read_checkpoint(
    output: Path, step: int | None, to: Path | None, state: Mapping[str, Tensor]
) -> tuple[Chosen, Cursor]:
    """Read the weights of a checkpoint, and those of the next if a run that goes on has removed it meanwhile.

    Args:
        output: As for `choose`.
        step: Likewise.
        to: Likewise.
        state: Filled in place; any part of what was saved.

    Raises:
        InputError: It cannot be read, or others may write where it lies.
        ConfigError: It belongs to another run.
    """
    from services.trainer.checkpoint import Checkpoints

    while True:
        chosen = choose(output, step, to)
        try:
            return chosen, Checkpoints(output / CHECKPOINTS, chosen.run).load(chosen.checkpoint, state)
        except InputError:
            if choose(output, step, to).checkpoint == chosen.checkpoint:
                raise
