"""The chain tables on disk: one file per pair of tokenizers, mapped into memory by every process that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from xtoken_core.atomic import atomic_path
from xtoken_core.chain.tables import ChainTables
from xtoken_core.errors import InputError, OutputError
from xtoken_core.projection.fingerprint import (
    CHAIN_FORMAT,
    FORMAT_KEY,
    STUDENT_KEY,
    TEACHER_KEY,
    special_tokens_metadata,
)
from xtoken_core.projection.stored_tensors import safetensors_bytes
from xtoken_core.regular_files import descriptor_path


def write_tables(
    tables: ChainTables, path: Path, fingerprints: tuple[str, str], special_tokens: Mapping[str, str] | None = None
) -> None:
    """Write the tables; the file appears whole or not at all, and the same tables give the same bytes.

    Args:
        tables: On the CPU.
        path: The file; its directory is made.
        fingerprints: Those of the student's and the teacher's tokenizer.
        special_tokens: Pairs of special tokens with which they were built.

    Raises:
        OutputError: It cannot be written.
    """
    metadata = {FORMAT_KEY: CHAIN_FORMAT, STUDENT_KEY: fingerprints[0], TEACHER_KEY: fingerprints[1]}
    metadata |= special_tokens_metadata(special_tokens or {})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as scratch:
            scratch.write_bytes(safetensors_bytes(tables.flat(), metadata))
    except OSError as error:
        raise OutputError(f"cannot write the chain tables {path}: {error}") from error


def read_tables(path: Path) -> ChainTables:
    """Map the tables of a file into memory.

    Raises:
        InputError: There are none, or of another version, or they are damaged.
    """
    try:
        with descriptor_path(path) as opened, safe_open(opened, framework="pt") as file:
            if (version := (file.metadata() or {}).get(FORMAT_KEY, "no format")) != CHAIN_FORMAT:
                raise InputError(
                    f"the chain tables {path} have {version}, this version reads {CHAIN_FORMAT}: delete the file, it "
                    "is built again"
                )
            return ChainTables.of_flat({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(
            f"the chain tables {path} are damaged ({error}): delete the file, it is built again"
        ) from error
