"""Loading tokenizers from Hugging Face directories, without the models' code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from xtoken_core.alignment import TokenAligner
from xtoken_core.config.spec import ModelSpec, RunSpec
from xtoken_core.errors import InputError, first_line
from xtoken_core.model_files import check_model_directory
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.tokenizers.chat_templates import read_chat_template


def tokenizer_of(spec: ModelSpec, what: str) -> Any:
    """Load the tokenizer of a run's model, with the chat template that its settings name.

    Raises:
        InputError: It cannot be loaded, or there is no such template.
    """
    tokenizer = load_tokenizer(spec.tokenizer_dir, what)
    if spec.chat_template is not None:
        tokenizer.chat_template = read_chat_template(check_allowed(spec.chat_template, f"the {what}'s chat template"))
    return tokenizer


def aligners_of(spec: RunSpec, student: Any, teachers: Sequence[Any]) -> list[TokenAligner | None]:
    """Return the aligners of the teachers whose special tokens are paired by hand; None: the collator makes its own.

    Args:
        spec: The run.
        student: The student's tokenizer.
        teachers: Each teacher's; None for one with the student's.

    Raises:
        ConfigError: A pair names a token that is not special.
    """
    return [
        TokenAligner(student, tokenizer, teacher.special_tokens) if teacher.special_tokens and tokenizer else None
        for teacher, tokenizer in zip(spec.teacher, teachers, strict=True)
    ]


def load_tokenizer(directory: Path, what: str) -> Any:
    """Load the tokenizer in a directory.

    Raises:
        InputError: There is no such directory, or it cannot be loaded.
    """
    check_allowed(directory, f"the {what}'s tokenizer")
    if not directory.is_dir():  # transformers would look it up as a name on the hub
        raise InputError(f"the {what} has no tokenizer: {directory} is not a directory")
    check_model_directory(directory)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise whatever a damaged file leads to
        tokenizer_fingerprint(directory)  # raises a better error if its files are missing or damaged
        raise InputError(f"cannot load the {what}'s tokenizer from {directory}: {first_line(error)}") from error


def sides_of(
    student: Any, teacher: Any, special_tokens: Mapping[str, str]
) -> tuple[TokenAligner, TextTokenizer, TextTokenizer]:
    """Return the aligner of two tokenizers, and both as encoders of text."""
    aligner = TokenAligner(student, teacher, special_tokens)
    return aligner, TextTokenizer(student, "student"), TextTokenizer(teacher, "teacher")


def pad_id(tokenizer: Any) -> int:
    """Return the id for padding: the tokenizer's pad token, or else its end-of-text token, or else 0."""
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            return value
    return 0
