"""Alignments of texts in a child process that keeps its tokenizers loaded, for a control plane.

A request is `{"student": DIR, "teacher": DIR, "text": ..., "special_tokens": {...}}`, its result `{"sides": ...,
"notes": [...]}`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from xtoken_core.errors import InputError, XtokenError, os_errors_as
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.processes.child_process import Child, ChildError, answer_requests

KEPT_PAIRS = 4
IDLE_S = 600.0
READ_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "chat_template")
"""Beginnings of the names of files that a tokenizer is read from."""


class AlignServer:
    """Handle of the child process; it is started by the first request and ended when it has been idle for long.

    Args:
        environment: Variables of the child: the roots that it may read.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._idle: threading.Timer | None = None

    def align(
        self,
        student: Path,
        teacher: Path,
        text: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Align a text; requests are answered one after the other.

        Args:
            student: Directory of the student's tokenizer.
            teacher: Directory of the teacher's.
            text: The text.
            special_tokens: Special tokens of the student and their partners.
            timeout_s: Seconds after which the process is killed, or another request is no longer waited for.

        Returns:
            Each side's tokens, and the aligner's notes.

        Raises:
            InputError: The text cannot be aligned in time, or a tokenizer cannot be read.
        """
        until = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise InputError("other alignments take long: retry in a moment")
        try:
            request = {"student": student, "teacher": teacher, "text": text.encode("utf-8", "replace").decode()}
            request["special_tokens"] = dict(special_tokens or {})
            if self._child is None or not self._child.alive:
                self._end()
                self._child = Child(__name__, environment=self._environment)
            answer: dict[str, Any] = self._child.ask(request, silence_s=until - time.monotonic())
        except ChildError as error:
            raise InputError(f"cannot align the text: {error}") from error
        except XtokenError as error:
            raise InputError(str(error)) from error
        finally:
            self._lock.release()
            self._end_when_idle()
        return answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    def _end_when_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = threading.Timer(IDLE_S, self.close)
        self._idle.daemon = True
        self._idle.start()


def main() -> None:
    """Answer requests; tokenizers stay loaded in between."""
    answer_requests(
        lambda request, _: _aligned(
            Path(request["student"]), Path(request["teacher"]), request["text"], request["special_tokens"]
        )
    )


def _aligned(student: Path, teacher: Path, text: str, special_tokens: dict[str, str]) -> dict[str, Any]:
    """Align a text with the tokenizers of two directories, which are loaded again if their files have changed."""
    for directory, what in ((student, "the student's tokenizer"), (teacher, "the teacher's tokenizer")):
        check_allowed(directory, what)
    from xtoken_core.alignment.report import shown_sides

    versions = tuple(tuple(_versions(directory)) for directory in (student, teacher))
    aligner, ours, theirs = _loaded_sides(student, teacher, versions, tuple(special_tokens.items()))
    sides = shown_sides(aligner, ours, theirs, text)
    shown = [{"name": name, "tokens": [asdict(token) for token in tokens]} for name, tokens in sides]
    return {"sides": shown, "notes": list(aligner.notes)}


@lru_cache(KEPT_PAIRS)
def _loaded_sides(student: Path, teacher: Path, versions: Hashable, special_tokens: tuple[tuple[str, str], ...]) -> Any:
    from xtoken_services.common.tokenizers.loading import sides_of

    return sides_of(*_loaded_tokenizers(student, teacher, versions), dict(special_tokens))


@lru_cache(KEPT_PAIRS)
def _loaded_tokenizers(student: Path, teacher: Path, versions: Hashable) -> tuple[Any, Any]:
    from xtoken_services.common.tokenizers.loading import load_tokenizer

    return load_tokenizer(student, "student"), load_tokenizer(teacher, "teacher")


def _versions(directory: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, time of change and size of a tokenizer's files, to detect changes."""
    with os_errors_as(InputError, f"cannot read the tokenizer in {directory}"), os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(READ_FILES) or entry.name == "config.json":
                status = entry.stat()
                yield entry.name, status.st_mtime_ns, status.st_size


if __name__ == "__main__":
    main()
