"""Which tokenizers a projection belongs to: hashes of files, found without loading them into a library. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from xtoken_core.errors import InputError

STUDENT_KEY = "student_fingerprint"
TEACHER_KEY = "teacher_fingerprint"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
)
MAX_HEADER_BYTES = 100 << 20


def tokenizer_fingerprint(directory: Path) -> str:
    """Hash of the files that decide how a tokenizer splits text.

    Raises:
        InputError: The directory holds none of them.
    """
    digest = hashlib.sha256()
    found = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not found:
        raise InputError(f"no tokenizer in {directory}: it takes a Hugging Face directory with tokenizer.json")
    fast = directory / "tokenizer.json"
    for path in [fast] if fast in found else found:
        digest.update(path.name.encode() + b"\0" + _canonical(path) + b"\0")
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """Hash of a file's bytes.

    Raises:
        InputError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def safetensors_metadata(path: Path) -> dict[str, str] | None:
    """The metadata of a safetensors file; None if it is another kind of file.

    Raises:
        InputError: The file cannot be read, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if path.suffix != ".safetensors":
                return None
            if not 2 <= size <= MAX_HEADER_BYTES:
                raise InputError(f"{path} is no safetensors file")
            header: Any = json.loads(file.read(size))
    except OSError as error:
        raise InputError(f"cannot read the projection file {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is no safetensors file: {error}") from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {str(key): str(value) for key, value in metadata.items()}


def check_projection_pair(path: Path, student: Path, teacher: Path) -> None:
    """Refuse a projection that was built for other tokenizers; a file without fingerprints passes.

    Args:
        path: The projection file.
        student: Directory of the student's tokenizer.
        teacher: Directory of the teacher's tokenizer.

    Raises:
        InputError: The file is missing, damaged or of another pair.
    """
    metadata = safetensors_metadata(path)
    if not metadata or STUDENT_KEY not in metadata:
        return
    for key, directory in ((STUDENT_KEY, student), (TEACHER_KEY, teacher)):
        if metadata.get(key) != tokenizer_fingerprint(directory):
            raise InputError(
                f"the projection {path} was built for another tokenizer than {directory}: build it anew by "
                f"xtoken projection build --student {student} --teacher {teacher} --out {path}"
            )


def _canonical(path: Path) -> bytes:
    """JSON without its layout, anything else as it is."""
    raw = path.read_bytes()
    if path.suffix != ".json":
        return raw
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise InputError(f"cannot read the tokenizer {path}: {error}") from error
    if isinstance(document, dict):
        document.pop("truncation", None)
        document.pop("padding", None)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
