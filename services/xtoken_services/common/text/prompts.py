"""Prompts as a student reads them: of rollouts, of tasks and of samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xtoken_core.config.eval import SAMPLE_TOKENS
from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import BadRecord, TextIndex
from xtoken_core.dataset.records import ANSWER_FIELDS, FOR_TEACHERS, ROUTE
from xtoken_core.errors import InputError
from xtoken_core.tasks import Prompt, read_prompts
from xtoken_core.tokenizing import ConversationError, TextTokenizer, UnspellableError
from xtoken_services.common.files.allowed_paths import readable_roots
from xtoken_services.common.text.collation import LOOKED_AT, LOOKED_AT_CHARACTERS

BESIDE = (*ANSWER_FIELDS, *FOR_TEACHERS, ROUTE)
"""What a prompt keeps of its record."""


def look_at_prompts(spec: RunSpec, tokenizer: TextTokenizer, index: TextIndex) -> dict[str, Any]:
    """Encode prompts that lie evenly in the text of a run with rollouts, and count those that would be skipped.

    A tokenizer may take seconds for each mebibyte: of long texts fewer are looked at.

    Args:
        spec: The run.
        tokenizer: The student's.
        index: Its text.

    Returns:
        The numbers of `positions` and `skipped` ones, and why the first is skipped.

    Raises:
        InputError: All are.
    """
    most, number, room, reasons = min(LOOKED_AT, len(index)), 0, LOOKED_AT_CHARACTERS, []
    for at in range(most):
        (record,) = index.read([at * len(index) // most])
        size = 0 if isinstance(record, BadRecord) else len(record.document)
        if size > room:
            continue
        number, room = number + 1, room - size
        try:
            if isinstance(record, BadRecord):
                raise ConversationError(record.reason)
            encoded_prompt(record.value, tokenizer, spec)
        except (ConversationError, UnspellableError) as error:
            reasons.append(f"{index.location(record.number)}: {error}")
    if number and len(reasons) == number:
        raise InputError(f"none of {number} prompts, evenly spread over the text, can be used; the first: {reasons[0]}")
    return {"positions": number, "skipped": len(reasons), "reason": next(iter(reasons), "")}


def task_prompts(spec: RunSpec, tokenizer: TextTokenizer) -> tuple[dict[str, list[Prompt]], dict[str, list[list[int]]]]:
    """Return the prompts of a run's tasks by name, and their tokens.

    Args:
        spec: The run, with `eval.tasks`.
        tokenizer: The student's.

    Raises:
        InputError: A task cannot be read, or a prompt leaves no room for its completion.
    """
    assert spec.eval is not None and spec.eval.tasks is not None
    tasks = spec.eval.tasks
    room = spec.student.context_length - tasks.max_new_tokens
    prompts: dict[str, list[Prompt]] = {}
    ids: dict[str, list[list[int]]] = {}
    for name, path in tasks.by_name.items():
        prompts[name] = read_prompts(path, tasks.match, tasks.max_prompts, within=readable_roots())
        ids[name] = [_task_ids(tokenizer, path, number, prompt) for number, prompt in enumerate(prompts[name], 1)]
        for number, own in enumerate(ids[name], 1):
            if not 0 < len(own) <= room:
                raise InputError(
                    f"eval.tasks: prompt {number} of {path} has {len(own)} tokens: with eval.tasks.max_new_tokens = "
                    f"{tasks.max_new_tokens}, student.context_length has room for 1 to {max(0, room)}"
                )
    return prompts, ids


def _task_ids(tokenizer: TextTokenizer, path: Path, number: int, prompt: Prompt) -> list[int]:
    if not prompt.messages:
        return [int(token) for token in tokenizer.begin(prompt.text)]
    try:
        ids = tokenizer.tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # templates raise whatever they like
        raise InputError(
            f"eval.tasks: prompt {number} of {path} holds messages that the student's chat template does not "
            f"take: {str(error).partition(chr(10))[0]}"
        ) from error
    return [int(token) for token in ids]


def sample_tokens(spec: RunSpec) -> int:
    """Return the tokens of a completion of `eval.samples` at most."""
    return min(SAMPLE_TOKENS, spec.student.context_length // 2)


def sample_prompts(spec: RunSpec, tokenizer: TextTokenizer) -> list[list[int]]:
    """Return the tokens of the prompts of `eval.samples`.

    Args:
        spec: The run, with an evaluation.
        tokenizer: The student's.

    Raises:
        InputError: A prompt leaves no room for its completion.
    """
    assert spec.eval is not None
    room = spec.student.context_length - sample_tokens(spec)
    every: list[list[int]] = [tokenizer.begin(prompt).tolist() for prompt in spec.eval.samples]
    for prompt, ids in zip(spec.eval.samples, every, strict=True):
        if not 0 < len(ids) <= room:
            raise InputError(
                f"eval.samples: the prompt {prompt[:40]!r} has {len(ids)} tokens: beside {sample_tokens(spec)} new "
                f"ones, student.context_length has room for 1 to {max(0, room)}"
            )
    return every


def encoded_prompt(
    value: Mapping[str, Any], tokenizer: TextTokenizer, spec: RunSpec
) -> tuple[dict[str, Any], np.ndarray]:
    """Return a record's prompt, with what is kept beside it, and its tokens.

    Args:
        value: As of `prompt_of`.
        tokenizer: The student's.
        spec: The run, with rollouts.

    Raises:
        ConversationError: There is none, or it leaves no room for a completion.
        UnspellableError: The student has no token for a character, nor an unknown token.
    """
    assert spec.rollout is not None
    prompt = prompt_of(value, spec.rollout.prompt_characters)
    ids = np.array([]) if prompt is None else tokenizer.prompt(prompt)
    room = spec.student.context_length - spec.rollout.max_new_tokens
    if prompt is None or not 0 < len(ids) <= room:
        raise ConversationError(
            f"its prompt has {len(ids)} tokens: student.context_length and rollout.max_new_tokens leave room for "
            f"1 to {room}"
        )
    return prompt | {name: value[name] for name in BESIDE if name in value}, ids


def prompt_of(value: Mapping[str, Any], characters: int | None) -> dict[str, Any] | None:
    """Return the prompt of a record as `text` or `messages` with `tools`; None if there is nothing to complete.

    Args:
        value: A record's value: `text`, `prompt` and `completion`, or `messages`.
        characters: Maximum of characters of a plain text; None: all of it.
    """
    if "text" in value:
        return {"text": cut_at_word(str(value["text"]), characters)}
    if "completion" in value:
        return {"text": value["prompt"]}
    messages = list(value["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    tools = {"tools": value["tools"]} if "tools" in value else {}
    return {"messages": messages} | tools if messages else None


def cut_at_word(text: str, characters: int | None) -> str:
    """Return the beginning of a text up to the end of its last whole word.

    >>> cut_at_word("one two three", 9), cut_at_word("one two three", 7), cut_at_word("one", 2)
    ('one two', 'one two', 'on')
    """
    if characters is None or len(text) <= characters:
        return text
    head = text[:characters]
    if not text[characters].isspace():
        head = re.sub(r"\s+\S*$", "", head) or head
    return head.rstrip() or head
