"""Forms that name two tokenizers and their pairs of special tokens, on the pages that work on tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import Depends

from xtoken_core.errors import ConfigError
from xtoken_services.common.files.allowed_paths import RefusedError, Roots
from xtoken_services.common.tokenizers.special_tokens import parse_special_tokens
from xtoken_services.control.web.form import Form

EMPTY = {"kind": "chain", "student": "", "teacher": "", "text": "", "special_tokens": ""}


async def _submitted(form: Form) -> dict[str, str]:
    """Return the fields of a form, empty those that it lacks."""
    return EMPTY | form


Submitted = Annotated[dict[str, str], Depends(_submitted)]


def read_fields(
    values: dict[str, str], roots: Roots | None
) -> tuple[tuple[Path, Path], dict[str, str], dict[str, str]]:
    """Return the directories of student and teacher, the pairs of special tokens, and the errors by field."""
    errors: dict[str, str] = {}
    for name in ("student", "teacher"):
        errors |= _tokenizer_error(values[name].strip(), name, roots)
    pairs: dict[str, str] = {}
    try:
        lines = (line.strip() for line in values["special_tokens"].splitlines() if line.strip())
        pairs = parse_special_tokens(lines, "the pair")
    except ConfigError as error:
        errors["special_tokens"] = str(error)
    return (Path(values["student"].strip()), Path(values["teacher"].strip())), pairs, errors


def _tokenizer_error(path: str, name: str, roots: Roots | None) -> dict[str, str]:
    """Return why a field names no directory that may be read, by the field's name; empty if it does."""
    if not path:
        return {name: "Enter a directory with a tokenizer."}
    if not path.isprintable() or not Path(path).is_absolute():
        return {name: "Enter an absolute path."}
    try:
        if roots is not None:
            roots.check(Path(path), name)
        usable = Path(path).is_dir()
    except RefusedError as error:
        return {name: error.message}
    except OSError:  # a name that no file system takes
        usable = False
    return {} if usable else {name: "No such directory."}
