"""A model directory from a checkpoint: the student as the trainer has it, on the CPU, without a queue or a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from services.common.resume import CHECKPOINTS
from services.common.tokenizers import load_tokenizer
from services.trainer.checkpoint import Checkpoints, Cursor
from services.trainer.chosen import Chosen, choose
from services.trainer.export import export_student
from services.trainer.student import load_student
from xtoken_core.errors import InputError


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
    while True:
        chosen = choose(output, step, to)
        try:
            return chosen, Checkpoints(output / CHECKPOINTS, chosen.run).load(chosen.checkpoint, state)
        except InputError:
            if choose(output, step, to).checkpoint == chosen.checkpoint:
                raise
