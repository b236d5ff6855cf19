"""What a checkpoint says of its run, and whether that is this run: asked before anything is started. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError, InputError

CHECKPOINTS, RUN, RESOLVED = "checkpoints", "run.json", "resolved.json"
SETTINGS = {
    "samples_per_step": "train.samples_per_step",
    "records": "the number of records in data.path",
    "positions": "the run's length (train.max_steps, data.epochs)",
    "shuffle": "data.shuffle",
    "append_eos": "data.append_eos",
    "student length": "student.context_length",
    "student dtype": "student.dtype",
    "weights in float32": "train.master_weights",
    "student model": "student.model",
    "micro_batch_tokens": "train.micro_batch_tokens",
    "lora": "train.lora",
    "data": "the text",
}
"""What a part of a run's identity is called where it differs, if not by its own name."""


def newest_checkpoint(directory: Path) -> Path | None:
    """The one with the highest step in a directory of checkpoints."""
    found = sorted(directory.glob("step-????????")) if directory.is_dir() else []
    return found[-1] if found else None


def run_document(path: Path) -> dict[str, Any]:
    """What a checkpoint says of its run: `identity` and `cursor`.

    Raises:
        InputError: It cannot be read.
    """
    try:
        document = json.loads((path / RUN).read_text(encoding="utf-8"))
        return {"identity": dict(document["identity"]), "cursor": dict(document["cursor"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error) from error


def check_identity(path: Path, identity: Mapping[str, Any], run: ResolvedRun) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        ConfigError: It was made with other data, tokenizers or settings; the text names what differs.
    """
    mine = run.identity()
    every = dict.fromkeys([*mine, *identity])  # a teacher that was taken away is in the checkpoint's only
    differ = [SETTINGS.get(name, name) for name in every if identity.get(name) != mine.get(name)]
    if differ:
        raise ConfigError(
            f"the checkpoint {path} belongs to another run: what differs is {', '.join(differ)}; choose another "
            "output directory, or restore it"
        )


def check_output(run: ResolvedRun) -> int:
    """Refuse an output whose newest checkpoint is another run's.

    Returns:
        The step at which the run goes on: the newest checkpoint's, 0 without one.

    Raises:
        ConfigError: It is.
        InputError: The checkpoint cannot be read.
    """
    path = newest_checkpoint(run.spec.output / CHECKPOINTS)
    if path is None:
        return 0
    document = run_document(path)
    check_identity(path, document["identity"], run)
    return int(document["cursor"].get("step", 0))


def unreadable(path: Path, error: BaseException) -> InputError:
    """The one line for a damaged checkpoint."""
    first = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
    return InputError(f"cannot read the checkpoint {path}: {first}: remove it to go on from an older one")
