"""Checkpoints: written asynchronously and atomically, one directory per step."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from xtoken_core.atomic import atomic_rename, atomic_write
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import InputError, OutputError, XtokenError
from xtoken_services.common.files.private_files import check_private_directory
from xtoken_services.common.run.resume import (
    BEST,
    RUN,
    check_identity,
    checkpoint_name,
    checkpoints_in,
    discard,
    newest_checkpoint,
    read_run_document,
    unreadable,
    write_run_document,
)
from xtoken_services.trainer.checkpoint_files import (
    FILE_MODE,
    build_index,
    read_index,
    read_tensors,
    write_index,
    write_rank_file,
)
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.staging import Stage

log = logging.getLogger("xtoken.trainer")

PRIVATE = 0o700
T = TypeVar("T")


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


CURSOR = TypeAdapter(Cursor)


class Checkpoints:
    """The checkpoints of one run; the newest `train.keep_checkpoints` are kept.

    All ranks call `save` and `load` together. The state is copied to the host first; a thread writes it while training
    continues.

    Args:
        directory: Holds them; private, since a checkpoint decides what is trained.
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
        self._kept: int | None = None

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
        target = self.path_of(cursor.step)
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

    def path_of(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step."""
        return self.directory / checkpoint_name(step)

    def keep(self, step: int) -> None:
        """Protect the checkpoint of a step, the best so far, from deletion, and link `best` to it once it exists."""
        self._kept = step
        if self.group.is_leader:
            self._link_best()

    def latest(self) -> Path | None:
        """Return the newest checkpoint."""
        return newest_checkpoint(self.directory)

    def load(self, path: Path, state: Mapping[str, Tensor]) -> Cursor:
        """Read a checkpoint of this run; the tensors may be sharded differently than when it was saved.

        Args:
            path: The checkpoint.
            state: Tensors by the names given to `save`; filled in place.

        Raises:
            InputError: It cannot be read, is of another version, or others may write to it; on every rank, if on any.
            ConfigError: It belongs to a run with other data, tokenizers or settings; the text names what differs.
        """
        return _together(lambda: self._read(path, state), self.group.all_gather, InputError)

    def _read(self, path: Path, state: Mapping[str, Tensor]) -> Cursor:
        identity, document = read_run_document(path)
        try:
            cursor = CURSOR.validate_python(document)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, ("cursor", *first["loc"])))
            raise unreadable(path, ValueError(f"{name}: {first['msg']}")) from error
        check_identity(path, identity, self.run)
        try:
            read_tensors(path, read_index(path), state, self.group.rank, self.group.size)
        except (OSError, ValueError, SafetensorError) as error:
            raise unreadable(path, error) from error
        return cursor

    def _write(self, target: Path, document: str) -> None:
        """Write a temporary directory, every rank's file with fsync, and rename it: the body of the thread."""
        scratch, exchange = target.with_name(f".{target.name}.tmp"), self.group.exchange_in_background
        try:
            staged = self.stage.staged()
            index = build_index(staged, self.group.size)
            _together(lambda: self._prepare(scratch) if self.group.is_leader else None, exchange, OutputError)
            _together(lambda: write_rank_file(scratch, index, staged, self.group.rank), exchange, OutputError)
            if self.group.is_leader:
                write_index(scratch, index)
                self._commit(scratch, target, document)
        except Exception as error:  # reported by the next wait() or check()
            if self.group.is_leader:
                shutil.rmtree(scratch, ignore_errors=True)
            self._failure = OutputError(f"cannot write the checkpoint {target}: {_reason(error)}")

    def _prepare(self, scratch: Path) -> None:
        """Create an empty temporary directory, before any rank writes into it."""
        self.directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        check_private_directory(self.directory)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=PRIVATE)

    def _commit(self, scratch: Path, target: Path, document: str) -> None:
        check_private_directory(self.directory)  # a link would lead to another run's, which are replaced and pruned
        atomic_write(scratch / RUN, document)
        (scratch / RUN).chmod(FILE_MODE)
        if target.is_dir():
            discard(target)
        atomic_rename(scratch, target)
        self._link_best()
        self._prune()
        log.info("checkpoint %s", target)

    def _link_best(self) -> None:
        """Point the link `best` to the best checkpoint, once it is written."""
        if self._kept is not None and self.path_of(self._kept).is_dir():
            check_private_directory(self.directory)
            # Both the writing thread and the training thread may come here; the link is for readers, never read here.
            scratch = self.directory / f".{BEST}.{threading.get_ident()}.tmp"
            scratch.unlink(missing_ok=True)
            scratch.symlink_to(checkpoint_name(self._kept))
            atomic_rename(scratch, self.directory / BEST)

    def _prune(self) -> None:
        checkpoints = checkpoints_in(self.directory)
        for step in sorted(checkpoints)[: -self.run.spec.train.keep_checkpoints]:
            if step == self._kept:
                continue
            with suppress(OSError):
                discard(checkpoints[step])
        for scratch in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(scratch, ignore_errors=True)


def _together(action: Callable[[], T], exchange: Callable[[str], list[str]], kind: type[XtokenError]) -> T:
    """Return the result of this rank's action; raise the first rank's error on all ranks if any rank has failed.

    Args:
        action: What every rank does.
        exchange: Returns the texts of all ranks.
        kind: Error on a rank whose own action has not failed.
    """
    try:
        result = action()
    except Exception as error:
        exchange(_reason(error))
        raise
    if reason := next(filter(None, exchange("")), ""):
        raise kind(reason)
    return result


def _reason(error: BaseException) -> str:
    text = str(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text:
        return "the disk is full: free some space and start the run again"
    return (text.splitlines() or [type(error).__name__])[0]
