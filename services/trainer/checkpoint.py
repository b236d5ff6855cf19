"""Checkpoints: written whole or not at all, named by the step they stand at."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError, InputError, OutputError

log = logging.getLogger("xtoken.trainer")

FORMAT = 1
STATE = "state.pt"


@dataclass
class Cursor:
    """Where a run stands: what a checkpoint holds beside the model and the optimiser.

    Attributes:
        step: The next step; everything below it is done.
        trained: Positions trained so far.
        tokens: Student tokens trained so far.
        truncated: Documents among them that were cut.
        skipped: Tombstones below the cursor, with their reason.
        dead: Dead letters below the cursor, with their reason.
    """

    step: int = 0
    trained: int = 0
    tokens: int = 0
    truncated: int = 0
    skipped: dict[int, str] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, newest kept.

    Args:
        directory: Where they are.
        run: The run, whose identity every checkpoint carries.
    """

    def __init__(self, directory: Path, run: ResolvedRun) -> None:
        self.directory = directory
        self.run = run

    def save(self, cursor: Cursor, parts: Mapping[str, Any]) -> Path:
        """Write a checkpoint: a temporary directory, fsync, rename, fsync of the parent.

        Args:
            cursor: Where the run stands.
            parts: State dicts by name.

        Raises:
            OutputError: It could not be written; older ones are untouched and nothing half-written is left.
        """
        target = self.directory / f"step-{cursor.step:08d}"
        scratch = self.directory / f".{target.name}.tmp"
        state = {"format": FORMAT, "identity": self._identity(), "cursor": asdict(cursor), **parts}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            with (scratch / STATE).open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            sync_directory(scratch)
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
            sync_directory(self.directory)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(scratch, ignore_errors=True)
            full = getattr(error, "errno", None) == errno.ENOSPC or "file write failed" in str(error)
            why = "the disk is full: free some space and start the run again" if full else error
            raise OutputError(f"cannot write the checkpoint {target}: {why}") from error
        self._prune()
        log.info("checkpoint %s", target)
        return target

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        found = sorted(self.directory.glob("step-????????")) if self.directory.is_dir() else []
        return found[-1] if found else None

    def load(self, path: Path, device: torch.device) -> tuple[Cursor, dict[str, Any]]:
        """Read a checkpoint of this very run.

        Raises:
            InputError: It cannot be read.
            ConfigError: It belongs to a run with other data, tokenizers or settings; the text names what differs.
        """
        try:
            state = torch.load(path / STATE, map_location=device, weights_only=True)
            identity, cursor = state.pop("identity"), Cursor(**state.pop("cursor"))
        except Exception as error:  # torch.load raises many kinds
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"cannot read the checkpoint {path}: {first}: remove it to go on from an older one"
            ) from error
        mine = self._identity()
        differ = [name for name in mine if identity.get(name) != mine[name]]
        if differ:
            raise ConfigError(
                f"the checkpoint {path} belongs to another run: {', '.join(differ)} differ; "
                "choose another output directory, or restore the settings"
            )
        return cursor, state

    def _identity(self) -> dict[str, Any]:
        spec, run = self.run.spec, self.run
        return {
            "samples_per_step": spec.train.samples_per_step,
            "records": run.records,
            "positions": run.positions,
            "seed": spec.seed,
            "shuffle": spec.data.shuffle,
            "micro_batch_tokens": spec.train.micro_batch_tokens,
            "loss": spec.loss.model_dump_json(),
            **run.fingerprints(),
        }

    def _prune(self) -> None:
        found = sorted(self.directory.glob("step-????????"))
        for old in found[: -self.run.spec.train.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)
        for scratch in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(scratch, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
