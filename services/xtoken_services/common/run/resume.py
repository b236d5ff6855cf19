"""Resuming from checkpoints: finds the newest one and refuses another run's, before anything is started. No torch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xtoken_core.config.identity import RunIdentity
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.validation_errors import describe
from xtoken_core.errors import ConfigError, InputError, first_line
from xtoken_core.regular_files import parse_object
from xtoken_services.common.files.private_files import check_private_directory, read_private

CHECKPOINTS, RUN, RESOLVED = "checkpoints", "run.json", "resolved.json"
BEST = "best"
"""Link among the checkpoints to that of the best evaluation, with `eval.keep_best`."""
VERSION = 1
"""Of the form of a checkpoint, `version` in its `run.json`; the one that is written and read."""
RUN_BYTES = 1 << 30
"""Greatest size of a `run.json` that is read."""
NAME = re.compile(r"step-([0-9]{8})")
SETTINGS = {
    "samples_per_step": "train.samples_per_step",
    "records": "the number of records in data.path",
    "positions": "the run's length (train.max_steps, data.epochs)",
    "shuffle": "data.shuffle",
    "append_eos": "data.append_eos",
    "train_on": "data.train_on",
    "long": "data.long",
    "float32_weights": "train.master_weights",
    "micro_batch_tokens": "train.micro_batch_tokens",
    "packed": "train.packing",
    "optimizer": "train.optimizer",
    "data": "the text",
    "held_out": "the held-out text (eval.path)",
    "held_out_bytes": "eval.max_bytes",
    "mixture": "the weights of data.sources",
    "routes": "teacher.name or the teachers of data.sources",
}
"""What messages call a field of the identity, if not by its own name."""


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the checkpoint with the highest step; None without one."""
    checkpoints = checkpoints_in(directory) if directory.is_dir() else {}
    return checkpoints[max(checkpoints)] if checkpoints else None


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Return the checkpoints in a directory, by step.

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


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step-{step:08d}"


def best_step(directory: Path) -> int | None:
    """Return the step of the best evaluation's checkpoint in a directory; None without one."""
    try:
        match = NAME.fullmatch((directory / BEST).readlink().name)
    except OSError:
        return None
    return int(match[1]) if match else None


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that no part of it is ever taken for a whole one."""
    scratch = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    checkpoint.rename(scratch)
    shutil.rmtree(scratch, ignore_errors=True)


def write_run_document(run: ResolvedRun, cursor: Mapping[str, Any]) -> str:
    """Return the content of a checkpoint's `run.json`."""
    return json.dumps({"version": VERSION, "identity": run.identity().model_dump(mode="json"), "cursor": cursor})


def read_run_document(path: Path) -> tuple[RunIdentity, dict[str, Any]]:
    """Read a checkpoint's `run.json`.

    Returns:
        The identity of its run; and the cursor.

    Raises:
        InputError: It cannot be read, is of another version, or others may write to it.
    """
    try:
        check_private_directory(path.parent)
        check_private_directory(path)
        document = parse_object(read_private(path, RUN, RUN_BYTES))
        version = document["version"]
        if version != VERSION:
            raise InputError(
                f"the checkpoint {path} has version {version}, this xtoken reads version {VERSION}: resume with the "
                "xtoken that wrote it, or choose another output directory"
            )
        return RunIdentity.model_validate(document["identity"]), dict(document["cursor"])
    except ValidationError as error:
        raise unreadable(path, ValueError(describe(error, RunIdentity))) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, error) from error


def check_identity(path: Path, identity: RunIdentity, run: ResolvedRun) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        ConfigError: It was made with other data, models or settings; the text names what differs.
    """
    different = [_setting(name) for name in identity.differences(run.identity())]
    if different:
        raise ConfigError(
            f"the checkpoint {path} belongs to another run: what differs is {', '.join(different)}; choose another "
            "output directory, or restore it"
        )


def unreadable(path: Path, error: BaseException) -> InputError:
    """Return the error of a damaged checkpoint."""
    first = first_line(error).partition(". ")[0]
    return InputError(f"cannot read the checkpoint {path}: {first}: remove it to resume from an older one")


def _setting(name: str) -> str:
    part = name.partition(".")[0]
    return f"train.{name}" if part == "lora" else SETTINGS.get("mixture" if part == "mixture" else name, name)
