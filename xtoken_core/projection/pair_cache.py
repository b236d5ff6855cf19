"""Files about a pair of tokenizers, built when a run needs them: projections and chain tables. No torch.

A file is named by the fingerprints of both tokenizers; its metadata holds them, and the version of its format.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from xtoken_core.config.loss import PAIR_NAMES, PairKind
from xtoken_core.projection.fingerprint import (
    CHAIN_FORMAT,
    FORMAT,
    FORMAT_KEY,
    SPECIAL_TOKENS_KEY,
    STUDENT_KEY,
    TEACHER_KEY,
    safetensors_metadata,
    special_tokens_metadata,
)
from xtoken_core.regular_files import descriptor_path
from xtoken_core.user_cache import user_cache

FORMATS: dict[PairKind, str] = {"projection": FORMAT, "chain": CHAIN_FORMAT}
_LOG = logging.getLogger("xtoken.pairs")


class PairCache:
    """A directory of files about pairs of tokenizers.

    Args:
        directory: Where the files are; None: the user's cache.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or user_cache()

    def file(
        self,
        kind: PairKind,
        fingerprints: tuple[str, str],
        build: Callable[[Path], None],
        special_tokens: Mapping[str, str] | None = None,
    ) -> Path:
        """Return the file of a pair, built first if there is none.

        A file of another version, of another pair or a damaged one is built again, and the log says so once.

        Args:
            kind: Its content.
            fingerprints: Those of the student's and the teacher's tokenizer.
            build: Writes the file, whole or not at all.
            special_tokens: Pairs of special tokens with which it is built; they are part of its name.
        """
        pairs = special_tokens or {}
        name = "-".join(
            print_[:20] for print_ in (*fingerprints, *map(_digest, special_tokens_metadata(pairs).values()))
        )
        path = self.directory / kind / f"{name}.safetensors"
        if path.exists():
            reason = outdated(path, kind, fingerprints, pairs)
            if reason is None:
                return path
            _LOG.warning("the %s %s %s: building it again", PAIR_NAMES[kind], path, reason)
        build(path)
        return path


def outdated(
    path: Path, kind: PairKind, fingerprints: tuple[str, str], special_tokens: Mapping[str, str] | None = None
) -> str | None:
    """Return why a file cannot be used; None if it can.

    Args:
        path: The file.
        kind: Its content.
        fingerprints: Those of the student's and the teacher's tokenizer.
        special_tokens: Pairs of special tokens with which it must have been built.
    """
    try:
        metadata = safetensors_metadata(path)
        if metadata is None:
            return "is damaged (it has no header)"
        if (version := metadata.get(FORMAT_KEY, "no format")) != FORMATS[kind]:
            return f"has {version}, this version reads {FORMATS[kind]}"
        if (metadata.get(STUDENT_KEY), metadata.get(TEACHER_KEY)) != fingerprints:
            return "belongs to other tokenizers"
        if metadata.get(SPECIAL_TOKENS_KEY) != special_tokens_metadata(special_tokens or {}).get(SPECIAL_TOKENS_KEY):
            return "was built with other pairs of special tokens"
        with descriptor_path(path) as opened, safe_open(opened, framework="numpy"):  # checks the size of every tensor
            return None
    except (SafetensorError, OSError) as error:
        return f"is damaged ({error})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
