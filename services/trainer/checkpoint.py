"""Checkpoints: written beside the training, whole or not at all, named by the step they stand at."""

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
from services.trainer.distributed import Group
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
    """Where a run stands: what a checkpoint holds beside the model and the optimiser.

    Attributes:
        step: The next step; everything below it is done.
        updates: Steps that the optimiser has taken; fewer than `step` if some had nothing to learn from or no number.
        trained: Positions trained so far.
        tokens: Student tokens trained so far.
        truncated: Documents among them that were cut.
        nonfinite: Steps left out because their loss or gradient was no finite number.
        nonfinite_in_a_row: How many of them came last, one after the other.
        skipped: Tombstones below the cursor, with their reason.
        dead: Dead letters below the cursor, with their reason.
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
    """The checkpoints of one run, newest kept.

    Every rank has one of these and calls `save` and `load` together with the others. What the device holds is copied
    to the host first; a thread writes it while the training goes on.

    Args:
        directory: Where they are; private, since loading one trusts its files.
        run: The run, whose identity every checkpoint carries.
        group: The ranks that write and read together.
    """

    def __init__(self, directory: Path, run: ResolvedRun, group: Group | None = None) -> None:
        self.directory = directory
        self.run = run
        self.group = group or Group(0, 1)
        self.stage = Stage()
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, cursor: Cursor, state: Mapping[str, Tensor]) -> Path:
        """Copy the state to the host and write it in the background, once the one before is written.

        Args:
            cursor: Where the run stands.
            state: Tensors by name; they may change as soon as `stage.wait` has been called.

        Returns:
            Where the checkpoint will be.

        Raises:
            OutputError: The checkpoint before could not be written.
        """
        self.settle()
        target = self.directory / f"step-{cursor.step:08d}"
        document = write_run_document(self.run, asdict(cursor))
        self.stage.copy(state)
        self._writer = threading.Thread(target=self._write, args=(target, document), name="checkpoint")
        self._writer.start()
        return target

    def settle(self) -> None:
        """Wait until what was saved is written.

        Raises:
            OutputError: It could not be; older checkpoints are untouched and nothing half-written is left.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.check()

    def check(self) -> None:
        """Raise what the writing has met, without waiting for it.

        Raises:
            OutputError: as `settle`.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        return newest_checkpoint(self.directory)

    def load(self, path: Path, state: Mapping[str, Tensor]) -> Cursor:
        """Read a checkpoint of this very run, into tensors that may be shared among ranks otherwise than when saved.

        Args:
            path: The checkpoint.
            state: Filled in place; the names that `save` was given.

        Raises:
            InputError: It cannot be read, or others may write where it lies.
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
        """A temporary directory, fsync of every rank's file, rename, fsync of the parent: the body of the thread."""
        scratch = target.with_name(f".{target.name}.tmp")
        try:
            staged = self.stage.staged()
            self._prepare(scratch)
            writer = FileSystemWriter(scratch, sync_files=True)
            save_state(staged, storage_writer=writer, process_group=self.group.background, no_dist=self.group.size == 1)
            if self.group.leads:
                self._publish(scratch, target, document)
        except (Exception, CheckpointException) as error:  # the thread must not die in silence
            if self.group.leads:
                shutil.rmtree(scratch, ignore_errors=True)
            self._failure = OutputError(f"cannot write the checkpoint {target}: {_reason(first_failure(error))}")

    def _prepare(self, scratch: Path) -> None:
        """An empty temporary directory, before any rank writes into it."""
        failure: OSError | None = None
        if self.group.leads:
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

    def _publish(self, scratch: Path, target: Path, document: str) -> None:
        atomic_write(scratch / RUN, document)
        if target.exists():
            shutil.rmtree(target)
        atomic_rename(scratch, target)
        self._prune()
        log.info("checkpoint %s", target)

    def _prune(self) -> None:
        found = sorted(self.directory.glob("step-????????"))
        for old in found[: -self.run.spec.train.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)
        for scratch in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(scratch, ignore_errors=True)


def cursor_from(document: Mapping[str, Any]) -> Cursor:
    """A cursor from JSON, whose keys are all text."""
    positions = {name: {int(i): str(why) for i, why in document[name].items()} for name in ("skipped", "dead")}
    return Cursor(**{**document, **positions})


def check_private(directory: Path) -> None:
    """Refuse a directory into which somebody else may have put files.

    Raises:
        InputError: It is another user's, or others may write to it.
    """
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise InputError(
            f"others may write to the checkpoints in {directory}, and loading one trusts its files: make sure that "
            f"they are yours, then chown and chmod 700 {directory}"
        )


def first_failure(error: BaseException) -> BaseException:
    """What a rank met, from what the ranks agreed on."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        found = next(iter(failures.values()))[0]
        return found if isinstance(found, BaseException) else error
    return error


def _reason(error: BaseException) -> str:
    told = str(error)
    full = getattr(error, "errno", None) == errno.ENOSPC or "file write failed" in told or "writing file" in told
    if full or "No space left" in told:
        return "the disk is full: free some space and start the run again"
    return (told.splitlines() or [type(error).__name__])[0]
