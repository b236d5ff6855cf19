"""Builds of chain tables and projections without a run, each in a child process, for the page."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xtoken_core.config.loss import PAIR_NAMES, PairKind
from xtoken_core.errors import XtokenError
from xtoken_services.common.processes.child_process import BUILD_SILENCE_S, ask_child
from xtoken_services.common.tables.pair_files import BUILDER

log = logging.getLogger("xtoken.control")

MAX_ACTIVE = 2
MAX_KEPT = 20


class BusyError(XtokenError):
    """Too many builds are in progress."""

    status = 429


class _CancelledError(Exception):
    """The build is to end."""


@dataclass
class TableBuild:
    """One build.

    Attributes:
        id: Names it on the page.
        kind: The content of the file.
        student: Directory of the student's tokenizer.
        teacher: Directory of the teacher's.
        special_tokens: Pairs of special tokens.
        began: Seconds since the epoch.
        done: Part (0 to 1) that is done.
        file: The file, once it is built; empty before.
        facts: Its content in words.
        error: Why there is none.
        seconds: Duration, once it is over.
    """

    id: str
    kind: PairKind
    student: Path
    teacher: Path
    special_tokens: dict[str, str]
    began: float = field(default_factory=time.time)
    done: float = 0.0
    file: str = ""
    facts: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def active(self) -> bool:
        """True until the build is over."""
        return self.seconds is None

    @property
    def name(self) -> str:
        """Name of what is built."""
        return PAIR_NAMES[self.kind]


class TableBuilds:
    """The builds of a control plane, newest first; the files stay in the user's cache.

    Args:
        environment: Variables of the child processes: the roots that they may read.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._builds: list[TableBuild] = []

    def list(self) -> list[TableBuild]:
        """Return the builds, newest first."""
        with self._lock:
            return [*self._builds]

    def start(self, kind: PairKind, student: Path, teacher: Path, special_tokens: dict[str, str]) -> TableBuild:
        """Start a build; one of the same tables that is in progress is returned instead.

        Args:
            kind: The content of the file.
            student: Directory of the student's tokenizer.
            teacher: Directory of the teacher's.
            special_tokens: Special tokens of the student and their partners.

        Raises:
            BusyError: Too many are in progress.
        """
        with self._lock:
            active = [build for build in self._builds if build.active]
            wanted = kind, student, teacher, special_tokens
            for build in active:
                if (build.kind, build.student, build.teacher, build.special_tokens) == wanted:
                    return build
            if len(active) >= MAX_ACTIVE:
                raise BusyError(f"{len(active)} builds are in progress: wait until one of them has ended")
            build = TableBuild(secrets.token_hex(4), *wanted)
            ended = [build for build in self._builds if not build.active]
            self._builds = sorted([build, *active, *ended[: MAX_KEPT - 1]], key=lambda build: -build.began)
        threading.Thread(target=self._run, args=(build,), name=f"tables-{build.id}", daemon=True).start()
        return build

    def cancel(self, build_id: str) -> None:
        """Cancel a build; does nothing if it is over."""
        for build in self.list():
            if build.id == build_id:
                build.cancelled.set()

    def close(self) -> None:
        """Cancel all builds."""
        for build in self.list():
            build.cancelled.set()

    def _run(self, build: TableBuild) -> None:
        request = {name: getattr(build, name) for name in ("kind", "student", "teacher", "special_tokens")}
        began = time.monotonic()

        def note(_: str, done: float) -> None:
            build.done = done
            if build.cancelled.is_set():
                raise _CancelledError

        try:
            built = ask_child(BUILDER, request, silence_s=BUILD_SILENCE_S, environment=self._environment, progress=note)
            build.facts = [str(fact) for fact in built["facts"]]
            build.file, build.done = str(built["file"]), 1.0
        except _CancelledError:
            build.error = "cancelled"
        except (XtokenError, OSError) as error:
            build.error = str(error)
            log.warning("building the %s of %s and %s: %s", build.name, build.student, build.teacher, error)
        build.seconds = time.monotonic() - began
