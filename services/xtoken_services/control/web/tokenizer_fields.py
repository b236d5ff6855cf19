"""Fields that name two tokenizers and their pairs of special tokens, on the pages that work on tokenizers."""

from __future__ import annotations

from pathlib import Path

from xtoken_services.common.files.allowed_paths import OutsideError, Roots
from xtoken_services.common.tokenizers.special_tokens import parse_special_tokens


def pairs_of(text: str) -> dict[str, str]:
    """Return the pairs of special tokens of a field with one pair a line.

    Raises:
        ConfigError: A line is no pair.
    """
    return parse_special_tokens((line.strip() for line in text.splitlines() if line.strip()), "the pair")


def tokenizer_error(path: str, name: str, roots: Roots | None) -> dict[str, str]:
    """Return why a field names no directory that may be read, by the field's name; empty if it does."""
    if not path:
        return {name: "Enter a directory with a tokenizer."}
    if not path.isprintable() or not Path(path).is_absolute():
        return {name: "Enter an absolute path."}
    try:
        if roots is not None:
            roots.check(Path(path), name)
        usable = Path(path).is_dir()
    except OutsideError as error:
        return {name: error.message}
    except OSError:  # a name that no file system takes
        usable = False
    return {} if usable else {name: "No such directory."}
