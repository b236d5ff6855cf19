"""Which checkpoint of a run is exported, and where to: asked before anything heavy is loaded. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from services.common.resume import CHECKPOINTS, RESOLVED
from services.common.roots import Roots, confined
from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.errors import InputError, OutputError

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
