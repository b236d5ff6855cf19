"""Facts of a tokenizer from its files, without torch: vocabulary size and chat template."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from xtoken_core.errors import InputError
from xtoken_core.model_files import check_model_directory
from xtoken_core.regular_files import TOKENIZER_LIMIT, read_json_object, read_regular
from xtoken_services.common.processes.child_process import Progress, answer_requests, ask_child

SILENCE_S = 120.0
"""Seconds after which a process that reads a tokenizer is killed."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def vocabulary_size(directory: Path) -> int:
    """Return the highest token id of the tokenizer in a directory, plus one.

    Raises:
        InputError: There is no tokenizer, or it cannot be read.
    """
    fast = directory / "tokenizer.json"
    if not directory.is_dir():
        raise InputError(f"no tokenizer: {directory} is not a directory")
    if os.path.lexists(fast):
        try:
            vocabulary = Tokenizer.from_buffer(read_regular(fast, TOKENIZER_LIMIT)).get_vocab(with_added_tokens=True)
        except OSError as error:
            raise InputError(f"cannot read the tokenizer {fast}: {error.strerror}") from error
        except Exception as error:  # the library raises a bare Exception
            raise InputError(f"cannot read the tokenizer {fast}: {error}") from error
        return max(vocabulary.values(), default=-1) + 1
    check_model_directory(directory)
    try:  # in a child process, as transformers imports torch
        return int(ask_child(__name__, {"directory": directory}, silence_s=SILENCE_S))
    except (InputError, ValueError) as error:
        raise InputError(f"cannot read the tokenizer in {directory}: {error}") from error


def has_chat_template(directory: Path) -> bool:
    """Return whether the tokenizer in a directory has a chat template; True if its files do not say."""
    if any((directory / name).exists() for name in _TEMPLATES):
        return True
    try:
        return bool(read_json_object(directory / "tokenizer_config.json").get("chat_template"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _size_by_transformers(request: dict[str, Any], _: Progress) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["directory"], local_files_only=True, trust_remote_code=False)
    return max(tokenizer.get_vocab().values()) + 1


if __name__ == "__main__":
    answer_requests(_size_by_transformers)
