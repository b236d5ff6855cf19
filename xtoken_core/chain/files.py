"""The chain tables on disk: one file per pair of tokenizers, mapped into memory by every process that reads it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from xtoken_core.atomic import atomic_path
from xtoken_core.chain.build import build_tables
from xtoken_core.chain.tables import ChainTables
from xtoken_core.errors import OutputError
from xtoken_core.projection.fingerprint import STUDENT_KEY, TEACHER_KEY, tokenizer_fingerprint

FORMAT_KEY, FORMAT = "format", "xtoken-chain-1"
_LOG = logging.getLogger("xtoken.chain")


def cache_directory() -> Path:
    """Return where tables are kept: `xtoken/chain` below `XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xtoken" / "chain"


def cached_tables(student_tokenizer: Any, teacher_tokenizer: Any, directory: Path | None = None) -> ChainTables:
    """Read the tables of two tokenizers, and build and write them first if there are none.

    A file of another version, of another pair or a damaged one is built again, and the log says so.

    Args:
        student_tokenizer: A tokenizer, see `build_tables`.
        teacher_tokenizer: Likewise.
        directory: Where the files are; None: `cache_directory`.

    Raises:
        OutputError: The file cannot be written.
    """
    prints = tokenizer_fingerprint(student_tokenizer), tokenizer_fingerprint(teacher_tokenizer)
    path = (directory or cache_directory()) / f"{prints[0][:20]}-{prints[1][:20]}.safetensors"
    if (found := _read_if_current(path, prints)) is not None:
        return found
    tables = ChainTables.of(build_tables(student_tokenizer, teacher_tokenizer))
    write_tables(tables, path, prints)
    mapped = _read_if_current(path, prints)
    return tables if mapped is None else mapped


def write_tables(tables: ChainTables, path: Path, fingerprints: tuple[str, str]) -> None:
    """Write the tables; the file appears whole or not at all.

    Args:
        tables: On the CPU.
        path: The file; its directory is made.
        fingerprints: Those of the student's and the teacher's tokenizer.

    Raises:
        OutputError: It cannot be written.
    """
    metadata = {FORMAT_KEY: FORMAT, STUDENT_KEY: fingerprints[0], TEACHER_KEY: fingerprints[1]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as scratch:
            save_file({name: tensor.contiguous() for name, tensor in tables.flat().items()}, scratch, metadata)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write the chain tables {path}: {error}") from error


def _read_if_current(path: Path, fingerprints: tuple[str, str]) -> ChainTables | None:
    """Map the file into memory; None if there is none, or one that has to be built again."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if (version := metadata.get(FORMAT_KEY, "no format")) != FORMAT:
                _LOG.warning(
                    "the chain tables %s have %s, this version reads %s: building them again", path, version, FORMAT
                )
                return None
            if (metadata.get(STUDENT_KEY), metadata.get(TEACHER_KEY)) != fingerprints:
                _LOG.warning("the chain tables %s belong to other tokenizers: building them again", path)
                return None
            return ChainTables.of_flat({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError, KeyError) as error:
        _LOG.warning("the chain tables %s are damaged (%s): building them again", path, error)
        return None
