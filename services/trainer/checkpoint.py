"""Checkpoints: written asynchronously and atomically, one directory per step."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from services.common.resume import (
    RUN,
    check_identity,
    newest_checkpoint,
    read_run_document,
    unreadable,
    write_run_document,
)
from services.trainer.distributed import RankGroup
from services.trainer.staging import Stage
from xtoken_core.atomic import atomic_rename, atomic_write
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import InputError, OutputError

log = logging.getLogger("xtoken.trainer")

warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)  # it prints what is raised as well

PRIVATE = 0o700


@dataclass
class Cursor:
    """Position of a run: the state of a checkpoint besides model and optimiser.

    Attributes:
        step: The next step; everything below it is done.
        updates: Optimizer updates; fewer than `step` if steps had no valid token or no finite gradient.
        trained: Positions trained so far.
        tokens: Student tokens trained so far.
        truncated: Truncated documents among them.
        nonfinite: Steps skipped because their loss or gradient was not finite.
        nonfinite_in_a_row: Number of the last steps that were so, consecutively.
        skipped: Reason of each tombstone below the cursor, by position.
        dead: Reason of each dead letter below the cursor, by position.
    """

    step: int = 0
    updates: int = 0
    trained: int = 0
    tokens: int = 0
    truncated: int = 0
    nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    skipped: dict[int, str] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run; the newest `train.keep_checkpoints` are kept.

    All ranks call `save` and `load` together. The state is copied to the host first; a thread writes it while training
    continues.

    Args:
        directory: Holds them; private, since loading one trusts its files.
        run: The run, whose identity every checkpoint carries.
        group: The ranks that write and read together.
    """

    def __init__(self, directory: Path, run: ResolvedRun, group: RankGroup | None = None) -> None:
        self.directory = directory
        self.run = run
        self.group = group or RankGroup(0, 1)
        self.stage = Stage()
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, cursor: Cursor, state: Mapping[str, Tensor]) -> Path:
        """Copy the state to the host and write it in the background, once the previous one is written.

        Args:
            cursor: Position of the run.
            state: Tensors by name; they may change as soon as `stage.wait` has been called.

        Returns:
            The checkpoint's directory, once it is written.

        Raises:
            OutputError: The previous checkpoint could not be written.
        """
        self.wait()
        target = self.directory / f"step-{cursor.step:08d}"
        document = write_run_document(self.run, asdict(cursor))
        self.stage.copy(state)
        self._writer = threading.Thread(target=self._write, args=(target, document), name="checkpoint")
        self._writer.start()
        return target

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            OutputError: It could not be written; older checkpoints are untouched and no partial one is left.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.check()

    def check(self) -> None:
        """Raise the error of the last write, if it has failed by now.

        Raises:
            OutputError: As `wait`.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def latest(self) -> Path | None:
        """Return the newest checkpoint."""
        return newest_checkpoint(self.directory)

    def load(self, path: Path, state: Mapping[str, Tensor]) -> Cursor:
        """Read a checkpoint of this run; the tensors may be sharded differently than when it was saved.

        Args:
            path: The checkpoint.
            state: Tensors by the names given to `save`; filled in place.

        Raises:
            InputError: It cannot be read, is of another version, or others may write to its directory.
            ConfigError: It belongs to a run with other data, tokenizers or settings; the text names what differs.
        """
        check_private(self.directory)
        identity, document = read_run_document(path)
        try:
            cursor = cursor_from(document)
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable(path, error) from error
        check_identity(path, identity, self.run)
        try:
            load_state(dict(state), storage_reader=FileSystemReader(path), no_dist=self.group.size == 1)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            raise unreadable(path, first_failure(error)) from error
        return cursor

    def _write(self, target: Path, document: str) -> None:
        """Write a temporary directory, every rank's file with fsync, and rename it: the body of the thread."""
        scratch = target.with_name(f".{target.name}.tmp")
        try:
            staged = self.stage.staged()
            self._prepare(scratch)
            writer = FileSystemWriter(scratch, sync_files=True)
            save_state(staged, storage_writer=writer, process_group=self.group.background, no_dist=self.group.size == 1)
            if self.group.is_leader:
                self._commit(scratch, target, document)
        except (Exception, CheckpointException) as error:  # reported by the next wait() or check()
            if self.group.is_leader:
                shutil.rmtree(scratch, ignore_errors=True)
            self._failure = OutputError(f"cannot write the checkpoint {target}: {_reason(first_failure(error))}")

    def _prepare(self, scratch: Path) -> None:
        """Create an empty temporary directory, before any rank writes into it."""
        failure: OSError | None = None
        if self.group.is_leader:
            try:
                self.directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(mode=PRIVATE)
            except OSError as error:
                failure = error
        if self.group.background is not None:
            dist.barrier(group=self.group.background)
        if failure is not None:
            raise failure

    def _commit(self, scratch: Path, target: Path, document: str) -> None:
        atomic_write(scratch / RUN, document)
        if target.exists():
            shutil.rmtree(target)
        atomic_rename(scratch, target)
        self._prune()
        log.info("checkpoint %s", target)

    def _prune(self) -> None:
        checkpoints = sorted(self.directory.glob("step-????????"))
        for old in checkpoints[: -self.run.spec.train.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)
        for scratch in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(scratch, ignore_errors=True)


def cursor_from(document: Mapping[str, Any]) -> Cursor:
    """Return a cursor from JSON, where all keys are strings."""
    positions = {name: {int(i): str(why) for i, why in document[name].items()} for name in ("skipped", "dead")}
    return Cursor(**{**document, **positions})


def check_private(directory: Path) -> None:
    """Refuse a directory that another user owns or may write to.

    Raises:
        InputError: It is.
    """
    status = directory.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise InputError(
            f"others may write to the checkpoints in {directory}, and loading one trusts its files: make sure that "
            f"they are yours, then chown and chmod 700 {directory}"
        )


def first_failure(error: BaseException) -> BaseException:
    """Return the first rank's error of a `CheckpointException`; another error as it is."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))[0]
        return first if isinstance(first, BaseException) else error
    return error


def _reason(error: BaseException) -> str:
    text = str(error)
    full = getattr(error, "errno", None) == errno.ENOSPC or "file write failed" in text or "writing file" in text
    if full or "No space left" in text:
        return "the disk is full: free some space and start the run again"
    return (text.splitlines() or [type(error).__name__])[0]
