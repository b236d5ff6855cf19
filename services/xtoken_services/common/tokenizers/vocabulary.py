"""Facts of a tokenizer from its files, without torch: vocabulary size and chat template."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from xtoken_core.errors import InputError
from xtoken_core.model_files import check_model_directory
from xtoken_core.regular_files import TOKENIZER_LIMIT, read_json_object, read_regular

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
    return _ask_transformers(directory)


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


def _ask_transformers(directory: Path) -> int:
    """Load the tokenizer in a subprocess, since transformers imports torch."""
    program = (
        "import json, sys; from transformers import AutoTokenizer; "
        "t = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True); "
        "print(json.dumps(max(t.get_vocab().values()) + 1))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise InputError(f"cannot read the tokenizer in {directory}: {last[0]}")
    return int(json.loads(done.stdout.strip().splitlines()[-1]))
