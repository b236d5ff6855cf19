"""Fingerprints of tokenizers and projection files, without torch or transformers."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from xtoken_core.errors import InputError, os_errors_as
from xtoken_core.regular_files import TOKENIZER_LIMIT, open_regular, read_regular

STUDENT_KEY, TEACHER_KEY = "student_fingerprint", "teacher_fingerprint"
SPECIAL_TOKENS_KEY = "special_tokens"
FORMAT_KEY, FORMAT, CHAIN_FORMAT = "format", "xtoken-projection-3", "xtoken-chain-4"
_FORMATS = "xtoken-projection-"
"""How the format of every version begins. Version 1 paired characters with tokens of byte fallback, version 2 specials
of similar names."""
_MAX_HEADER = 1 << 20
_ALTERNATIVES = ("tokenizer.json", "tekken.json")
_OTHERS = ("*.model", "*.model.v*", "vocab.json", "merges.txt", "vocab.txt", "*.tiktoken", "added_tokens.json")


class ProjectionFileError(InputError, ValueError):
    """Error of a file that is not a projection, or a damaged one."""


class MissingProjectionError(InputError, FileNotFoundError):
    """Error of a projection file that does not exist."""


def tokenizer_fingerprint(tokenizer_or_dir: Any, *, in_memory: bool = False) -> str:
    """Return the SHA-256, in hex, of a tokenizer: vocabulary, merges, added tokens, splitting and normalising.

    Padding, truncation, templates and the order of JSON keys do not enter, so that saving a tokenizer again does not
    change it.

    Args:
        tokenizer_or_dir: A Hugging Face directory (or a single tokenizer file), or a loaded tokenizer; one that was
            loaded from a directory is identified by that directory.
        in_memory: Take a loaded tokenizer as it is now, whatever its directory has.

    Raises:
        InputError: The directory is missing, unreadable or holds no tokenizer.
    """
    if isinstance(tokenizer_or_dir, (str, Path)):
        return _of_directory(Path(tokenizer_or_dir))
    origin = "" if in_memory else getattr(tokenizer_or_dir, "name_or_path", "")
    if origin and Path(origin).is_dir() and _files(Path(origin)):
        return _of_directory(Path(origin))
    backend = getattr(tokenizer_or_dir, "backend_tokenizer", None)
    if backend is not None:
        return _digest([("tokenizer.json", _canonical(backend.to_str().encode()))])
    vocabulary = json.dumps(sorted(tokenizer_or_dir.get_vocab().items(), key=lambda item: item[1]))
    return _digest([("vocabulary", vocabulary.encode())])


def special_tokens_metadata(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return pairs of special tokens as the metadata of a file that was built with them; empty without any."""
    return {SPECIAL_TOKENS_KEY: json.dumps(dict(sorted(pairs.items())), ensure_ascii=False)} if pairs else {}


def file_fingerprint(path: str | Path) -> str:
    """Return the SHA-256 of a file's content, in hex.

    Raises:
        InputError: The file cannot be read.
    """
    with os_errors_as(InputError, f"cannot read {path}"), os.fdopen(open_regular(Path(path)), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def projection_header(path: str | Path) -> dict[str, str] | None:
    """Return the metadata of an xtoken projection file; None for a file of another format.

    Raises:
        InputError: The file cannot be read, or is of another version.
    """
    try:
        metadata = safetensors_metadata(path)
    except FileNotFoundError as error:
        raise MissingProjectionError(
            f"there is no projection file {path}: build it with xtoken projection build"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read the projection {path}: {error.strerror}") from error
    version = (metadata or {}).get(FORMAT_KEY, "")
    if version != FORMAT and version.startswith(_FORMATS):
        raise InputError(
            f"the projection {path} has the format {version}, this version reads {FORMAT}: build it again with "
            "xtoken projection build, or leave teacher.projection out"
        )
    return metadata if version == FORMAT else None


def safetensors_metadata(path: str | Path) -> dict[str, str] | None:
    """Return the metadata of a safetensors file, read from its header alone; None if it has none.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        with os.fdopen(open_regular(Path(path)), "rb") as stream:
            start = stream.read(9)
            if len(start) < 9 or start[8:] != b"{":
                return None
            (size,) = struct.unpack("<Q", start[:8])
            header = json.loads(b"{" + stream.read(size - 1)) if 1 < size <= _MAX_HEADER else {}
    except (ValueError, RecursionError):
        return None
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        return None
    return {str(key): str(value) for key, value in metadata.items()}


def check_archive(path: str | Path) -> None:
    """Refuse a file that is not an archive as `torch.save` writes it; nothing in it is unpickled.

    Raises:
        ProjectionFileError: It is not.
        InputError: The file cannot be read.
    """
    reading = os_errors_as(InputError, f"cannot read the projection {path}")
    with reading, os.fdopen(open_regular(Path(path)), "rb") as stream:
        if zipfile.is_zipfile(stream):
            return
    raise ProjectionFileError(f"{path} is not a projection file: neither torch.save's format nor xtoken's own")


def is_sparse(path: str | Path) -> bool:
    """Return True if a projection file is of the public sparse form, `{(student id, teacher id): weight}`.

    Only the archive's directory and its pickle are searched, for the names of the dense form's tensors; nothing is
    unpickled. A file that is not an archive, xtoken's own form among them, is not sparse.

    Args:
        path: The projection file.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        with os.fdopen(open_regular(Path(path)), "rb") as stream, zipfile.ZipFile(stream) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if not names:
                return False
            with archive.open(names[0]) as member:  # of a dense file some hundred bytes: its tensors are other members
                return b"likelihoods" not in member.read(_MAX_HEADER)
    except zipfile.BadZipFile:
        return False
    except (OSError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise InputError(f"cannot read the projection {path}: {error}") from error


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files of a tokenizer, none of which is read.

    Raises:
        InputError: There are none.
    """
    if not path.exists():
        raise InputError(f"no tokenizer at {path}: it takes a Hugging Face directory")
    if files := [path] if path.is_file() else _files(path):
        return files
    raise InputError(
        f"{path} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json, …): name a directory that does"
    )


def _of_directory(path: Path) -> str:
    files = tokenizer_files(path)
    with os_errors_as(InputError, f"cannot read the tokenizer in {path}"):
        return _digest([(file.name, _content(file)) for file in files])


def _files(directory: Path) -> list[Path]:
    for name in _ALTERNATIVES:
        if os.path.lexists(directory / name):
            return [directory / name]
    return sorted({file for pattern in _OTHERS for file in directory.glob(pattern)})


def _content(file: Path) -> bytes:
    data = read_regular(file, TOKENIZER_LIMIT)
    if file.name != "tokenizer.json":
        return data
    try:
        return _canonical(data)
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not a tokenizer: {error}") from error


def _canonical(data: bytes) -> bytes:
    """Return the part of a `tokenizer.json` that decides which ids a text becomes."""
    tokenizer = msgspec.json.decode(data)
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise ValueError("it must be an object with a model")
    model = dict(tokenizer["model"])
    if "merges" in model:
        model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"] or ()]
    added = [(t.get("id"), t.get("content"), t.get("special")) for t in tokenizer.get("added_tokens") or ()]
    kept = {key: tokenizer.get(key) for key in ("normalizer", "pre_tokenizer")}
    content = {"model": model, "added": sorted(added, key=str), **kept}
    return msgspec.json.encode(content, order="deterministic")


def _digest(parts: list[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in parts:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
