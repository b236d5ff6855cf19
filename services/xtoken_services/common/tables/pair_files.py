"""Files about a run's pairs of tokenizers, built by a process of their own when a run starts. No torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.loss import PAIR_NAMES, PairKind
from xtoken_core.config.spec import RunSpec, TeacherSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.projection.fingerprint import (
    SPECIAL_TOKENS_KEY,
    STUDENT_KEY,
    TEACHER_KEY,
    check_archive,
    projection_header,
    special_tokens_metadata,
    tokenizer_fingerprint,
)
from xtoken_core.projection.pair_cache import PairCache
from xtoken_core.user_cache import user_cache
from xtoken_services.common.processes.child_process import BUILD_SILENCE_S, ask_child

log = logging.getLogger("xtoken.pairs")

BUILDER = "xtoken_services.common.tables.build_pair_file"


def cache_of(spec: RunSpec) -> PairCache:
    """Return the folder of a run's pair files: in the user's cache, or in the run's output.

    The output is taken on a Ray cluster, where every node sees it, and where the user's cache cannot be written.
    """
    try:
        own = user_cache()
    except RuntimeError:  # no home directory
        return PairCache(spec.output / "cache")
    if spec.workers.launcher == "ray" or not _writable(own):
        return PairCache(spec.output / "cache")
    return PairCache(own)


def pair_file(
    cache: PairCache,
    kind: PairKind,
    student: Path,
    teacher: Path,
    fingerprints: tuple[str, str],
    what: str,
    *,
    special_tokens: Mapping[str, str] | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Path:
    """Return the file about two tokenizers, built first if there is none.

    Args:
        cache: Where it is kept.
        kind: Its content.
        student: Directory of the student's tokenizer.
        teacher: Directory of the teacher's.
        fingerprints: Those of the two tokenizers.
        what: Name of the teacher for messages.
        special_tokens: Special tokens of the student and their partners.
        progress: Called several times a second while it is built, with the part (0 to 1) that is done; it may raise
            to stop.

    Raises:
        InputError: It cannot be built; the text has the reason.
    """

    def build(path: Path) -> None:
        log.info("building the %s of the student's and %s's tokenizer: %s", PAIR_NAMES[kind], what, path)
        sides = {"student": student, "teacher": teacher, "special_tokens": dict(special_tokens or {})}
        request = {"kind": kind, "file": path, **sides}
        try:
            ask_child(
                BUILDER, request, silence_s=BUILD_SILENCE_S, progress=lambda _, done: progress(done), threads=True
            )
        except (ConfigError, InputError) as error:
            raise InputError(
                f"cannot build the {PAIR_NAMES[kind]} of the student's and {what}'s tokenizer: {error}"
            ) from error

    return cache.file(kind, fingerprints, build, special_tokens)


def check_special_tokens(table: str, teacher: TeacherSpec) -> None:
    """Refuse a projection that was built with other pairs of special tokens; public formats do not name them.

    Args:
        table: The teacher's table of the run file.
        teacher: Its settings, which name a projection.

    Raises:
        ConfigError: It was.
    """
    assert teacher.projection is not None
    header = projection_header(teacher.projection)
    wanted = special_tokens_metadata(teacher.special_tokens).get(SPECIAL_TOKENS_KEY)
    if header is not None and header.get(SPECIAL_TOKENS_KEY) != wanted:
        raise ConfigError(
            f"{table}.special_tokens: {teacher.projection} was built with other pairs: build it again with "
            "xtoken projection build --special-token, or unset teacher.projection"
        )


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def check_projection_pair(path: str | Path, student: Any, teacher: Any) -> None:
    """Refuse a projection file that was built for another pair of tokenizers.

    Files of the public formats do not say what they were built for and pass.

    Args:
        path: The projection file.
        student: The student's tokenizer or its directory.
        teacher: The teacher's.

    Raises:
        InputError: The file cannot be read, is of no known format, or belongs to another student or teacher.
    """
    metadata = projection_header(path)
    if metadata is None:
        check_archive(path)
        return
    for name, key, tokenizer in (("student", STUDENT_KEY, student), ("teacher", TEACHER_KEY, teacher)):
        if key in metadata and metadata[key] != tokenizer_fingerprint(tokenizer):
            where = tokenizer if isinstance(tokenizer, (str, Path)) else "given"
            raise InputError(
                f"the projection {path} was built for another {name}'s tokenizer than {where}: "
                "build it again with xtoken projection build"
            )
