"""Models, tokenizers and records in memory, kept in the user's cache as the files that a run's processes read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_rename, sync_tree
from xtoken_core.errors import ConfigError, InputError, XtokenError, first_line
from xtoken_core.user_cache import user_cache

RECORDS = "records.jsonl"


def as_files(value: Any, name: str = "") -> Any:
    """Return a run file's document, or a part of it, with paths, as strings, in place of objects.

    Args:
        value: The document: a model or tokenizer may be an object of `transformers`, a text an iterable of records.
        name: Dotted path of the part.

    Raises:
        ConfigError: A model comes without its tokenizer, or there are several students.
        InputError: A record is no JSON object or there is none, a list has texts in place of paths, or the cache cannot
            be written.
    """
    several = isinstance(value, (list, tuple))
    if name == "student" and several:
        raise ConfigError('student: it takes one model: a path, or {"model": model, "tokenizer": tokenizer}')
    table = value if isinstance(value, Mapping) else {"model": value}
    if hasattr(table.get("model"), "parameters") and table.get("tokenizer") is None and not name.endswith(".model"):
        given = name.partition(".")[0]
        raise ConfigError(
            f'{name}: a model in memory needs its tokenizer: {given}={{"model": model, "tokenizer": tokenizer}}'
        )
    if hasattr(value, "merge_and_unload"):
        raise ConfigError(f"{name}: a model with adapters of PEFT: give what its merge_and_unload() returns")
    if hasattr(value, "save_pretrained"):
        model = hasattr(value, "parameters")
        return str(_kept(name, value.save_pretrained, (lambda: _model_digest(value)) if model else None))
    if isinstance(value, Mapping):
        return {key: as_files(item, f"{name}.{key}" if name else key) for key, item in value.items()}
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        return str(value) if isinstance(value, Path) else value
    if name == "data" or name.endswith(".path"):
        if not several or (not value and name == "data") or not all(isinstance(item, (str, Path)) for item in value):
            return str(_kept(name, lambda directory: _write_records(directory, value, name)) / RECORDS)
        for path in map(str, value):
            if "://" not in path and path[:1] != "~" and not os.path.lexists(path):
                raise InputError(f'{name}: there is no file {path[:60]!r}; a text is a record, [{{"text": "..."}}]')
    return [as_files(item, f"{name}.{number}") for number, item in enumerate(value)] if several else value


def _write_records(directory: Path, records: Iterable[Any], name: str) -> None:
    with (directory / RECORDS).open("w", encoding="utf-8") as out:
        for number, record in enumerate(records):
            try:
                out.write(json.dumps({**record}, ensure_ascii=False) + "\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(f'{name}: record {number} is no JSON such as {{"text": "..."}}: {error}') from error
        if not out.tell():
            raise InputError(f'{name}: there is no record in it: give some such as {{"text": "..."}}, or a path')


def _kept(name: str, write: Callable[[Path], object], digest_of: Callable[[], str] | None = None) -> Path:
    """Return the directory in the cache with some content, written first if there is none.

    Args:
        name: The setting, for messages.
        write: Writes it to a directory.
        digest_of: Returns the content's digest; None: that of the files, known once they are written.

    Raises:
        InputError: It cannot be written.
    """
    place = user_cache() / "objects"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=place) as scratch:
            content = Path(scratch, "content")
            content.mkdir()
            digest = digest_of() if digest_of else None
            if digest is None or not (place / digest).is_dir():
                write(content)
                digest = digest or _digest(content)
            if not (place / digest).is_dir():
                sync_tree(content)
                atomic_rename(content, place / digest)
            return place / digest
    except XtokenError:
        raise
    except Exception as error:  # a library's, for what it cannot write, or the disk's
        raise InputError(f"{name}: cannot keep it in {place}: {first_line(error)}") from error


def _digest(directory: Path) -> str:
    """Return the digest of a directory's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(directory)}\0{content}\n".encode())
    return digest.hexdigest()[:32]


def _model_digest(model: Any) -> str:
    """Return the digest of a model's configuration and weights."""
    import torch

    parts = (model, model.config, getattr(model, "generation_config", None))
    digest = hashlib.sha256("\0".join(map(repr, parts)).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
