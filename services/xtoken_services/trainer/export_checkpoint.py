"""`xtoken export`: a model directory from a checkpoint of a run, on the CPU, without a queue or a run.

Selecting the checkpoint needs no torch: what cannot be exported is refused before anything heavy is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.errors import ConfigError, InputError, OutputError, os_errors_as
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.run.resume import CHECKPOINTS, RESOLVED, best_step, checkpoints_in

if TYPE_CHECKING:
    from torch import Tensor

    from xtoken_services.trainer.checkpoint import Cursor


@dataclass(frozen=True)
class Export:
    """A checkpoint to export.

    Attributes:
        run: The resolved run.
        checkpoint: The checkpoint.
        step: Its step.
        target: Directory for the model, which does not exist yet.
    """

    run: ResolvedRun
    checkpoint: Path
    step: int
    target: Path


def choose(output: Path, step: int | None = None, to: Path | None = None) -> Export:
    """Select a checkpoint in a run's directory.

    Args:
        output: The run's directory, which may have been moved since the run.
        step: The checkpoint's step; None: the newest.
        to: Directory for the model; None: `model-step-NNNNNNNN` in `output`.

    Raises:
        InputError: The directory is not a run directory, or has no such checkpoint.
        OutputError: The target exists.
        ConfigError: A path leads out of the control plane's roots, or the run is of another version.
    """
    check_allowed(output, "OUTPUT")
    file = output / RESOLVED
    with os_errors_as(InputError, f"{output} is not a run directory: cannot read {file}"):
        run = parse_resolved_run(file.read_bytes(), source=str(file))
    checkpoints = checkpoints_in(output / CHECKPOINTS)
    if not checkpoints:
        raise InputError(
            f"{output} holds no checkpoint yet: a run writes one every train.checkpoint_every = "
            f"{run.spec.train.checkpoint_every} steps, and when it is stopped"
        )
    at = max(checkpoints) if step is None else step
    if at not in checkpoints:
        raise InputError(
            f"{output} holds no checkpoint of step {at}: there are those of step "
            f"{', '.join(map(str, sorted(checkpoints)))}"
        )
    target = to if to is not None else output / f"model-{checkpoints[at].name}"
    check_target(target)
    return Export(run, checkpoints[at], at, target)


def step_of_best(output: Path, step: int | None) -> int:
    """Return the step of the best evaluation's checkpoint.

    Raises:
        ConfigError: A step was named beside it.
        InputError: The run keeps none.
    """
    if step is not None:
        raise ConfigError("--best and --step name two checkpoints: leave one out")
    best = best_step(output / CHECKPOINTS)
    if best is None:
        raise InputError(
            f"{output} holds no checkpoint of a best evaluation after step 0, which eval.keep_best = true keeps"
        )
    return best


def check_target(target: Path) -> None:
    """Refuse a target that exists, or that this process may not write.

    Raises:
        OutputError: It exists.
        RefusedError: It leads out of the control plane's roots.
    """
    check_allowed(target, "--to", write=True)
    if os.path.lexists(target):
        raise OutputError(f"{target} is there already: remove it, or name another directory with --to")


def export_checkpoint(output: Path, step: int | None = None, to: Path | None = None) -> Export:
    """Write a model directory from a checkpoint, atomically; the run may continue meanwhile.

    Args:
        output: As for `choose`.
        step: Likewise.
        to: Likewise.

    Returns:
        The checkpoint and the target.

    Raises:
        InputError: The checkpoint, the student's model or its tokenizer cannot be read.
        ConfigError: As `choose`; also if the checkpoint is another run's.
        OutputError: The model cannot be written.
    """
    import torch

    from xtoken_services.common.tokenizers.loading import tokenizer_of
    from xtoken_services.trainer.export import export_student
    from xtoken_services.trainer.student import load_student

    spec = choose(output, step, to).run.spec
    trained = {"compile": False, "checkpoint_activations": False, "blockwise_head": False}  # nothing is computed here
    plain = spec.model_copy(update={"student": spec.student.model_copy(update=trained)})
    student = load_student(plain, torch.device("cpu"))
    tokenizer = tokenizer_of(spec.student, "student")
    state = {f"model.{name}": weight.detach() for name, weight in student.trainable.items()}
    chosen, cursor = read_checkpoint(output, step, to, state)
    student.sync_weights()
    whole = student.full_model(plain)
    assert whole is not None
    export_student(chosen.target, chosen.run, cursor, whole, tokenizer, output=output, replaces=False)
    return chosen


def read_checkpoint(
    output: Path, step: int | None, to: Path | None, state: Mapping[str, Tensor]
) -> tuple[Export, Cursor]:
    """Read the weights of a checkpoint, or of the next one if a running trainer has removed it meanwhile.

    Args:
        output: As for `choose`.
        step: Likewise.
        to: Likewise.
        state: Tensors by name, any subset of those saved; filled in place.

    Raises:
        InputError: It cannot be read, or others may write to its directory.
        ConfigError: It belongs to another run.
    """
    from xtoken_services.trainer.checkpoint import Checkpoints

    while True:
        chosen = choose(output, step, to)
        try:
            return chosen, Checkpoints(output / CHECKPOINTS, chosen.run).load(chosen.checkpoint, state)
        except InputError:
            if choose(output, step, to).checkpoint == chosen.checkpoint:
                raise
