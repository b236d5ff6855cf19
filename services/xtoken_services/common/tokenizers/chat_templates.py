"""Chat templates from files, to be used in place of a tokenizer's own. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from xtoken_core.errors import InputError
from xtoken_core.regular_files import MIB, read_json_object, read_regular

OWN_FILE, JSON_FILE, CONFIGURATION = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TEMPLATE_LIMIT = MIB
DEFAULT = "default"
"""Name of the template for conversations where a tokenizer has several."""


def read_chat_template(path: Path) -> str:
    """Return the chat template in a file, or that of the tokenizer in a directory.

    Args:
        path: A file with a Jinja template, or a Hugging Face directory.

    Raises:
        InputError: It cannot be read, or there is no template.
    """
    try:
        if not path.is_dir():
            return read_regular(path, TEMPLATE_LIMIT).decode("utf-8")
        if os.path.lexists(path / OWN_FILE):
            return read_regular(path / OWN_FILE, TEMPLATE_LIMIT).decode("utf-8")
        for name in (JSON_FILE, CONFIGURATION):
            template = _template_of(read_json_object(path / name)) if os.path.lexists(path / name) else None
            if template is not None:
                return template
    except OSError as error:
        raise InputError(f"cannot read the chat template {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"cannot read the chat template {path}: {error}") from error
    raise InputError(f"there is no chat template in {path}: name a .jinja file, or the directory of a chat model")


def _template_of(document: dict[str, object]) -> str | None:
    """Return the template in a tokenizer's configuration: a string, or the default one of a list with names."""
    template = document.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get(DEFAULT)
    return template if isinstance(template, str) and template else None
