"""Tasks of an evaluation: prompts with their answers in a JSON lines file, and how a completion is judged. No torch."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

from xtoken_core.config.eval import Match
from xtoken_core.errors import InputError, os_errors_as
from xtoken_core.regular_files import MIB, read_regular

MAX_BYTES = 64 * MIB
KEYS = {"prompt", "messages", "answer", "choices", "tests", "match"}
_GROUPS = r"(?!0)\d{1,3}(?:,\d{3})+(?!,?\d)"
NUMBER = re.compile(
    rf"(?:(?<!\d)[-+\N{{MINUS SIGN}}])?(?:(?:{_GROUPS}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\d))?"
)
LONGEST_NUMBER = 1000
BOXED = "\\boxed{"
NUMBERS = ("number", "last_number")
FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
PYTHON = ("", "python", "python3", "py")


@dataclass(frozen=True)
class Prompt:
    """A prompt with its answers.

    Attributes:
        text: The prompt; empty if it is a conversation.
        messages: The conversation, whose next message is the completion; empty if it is a text.
        answers: Accepted answers.
        choices: Choices that the answer is one of; empty for other matches than `choice`.
        match: How a completion is judged.
        tests: With the match `code`, what a program of the completion is followed by; else empty.
    """

    text: str
    messages: tuple[dict[str, str], ...]
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    match: Match
    tests: str = ""

    def program(self, completion: str) -> str:
        """Return the program of a completion, followed by the tests.

        It is the first fenced block of Python, or else the prompt, where that is a text, and the completion. Where the
        prompt ends in an indented line, as inside a function, the completion counts up to its first line that does not
        begin so.
        """
        blocks = (block[2] for block in FENCED.finditer(completion) if block[1].lower() in PYTHON)
        if (code := next(blocks, None)) is not None:
            code = dedent(code)
        else:
            inside = self.text.rstrip().rpartition("\n")[2][:1].isspace()
            code = self.text + (re.split(r"\n(?=\S)", completion, maxsplit=1)[0] if inside else completion)
        return f"{code}\n\n{self.tests}\n"

    def is_right(self, completion: str, passes: Callable[[str], bool] | None = None) -> bool:
        """Return True if a completion gives an accepted answer, or its program passes.

        Args:
            completion: The completion.
            passes: Returns whether a program ends without an error; the match `code` needs it.
        """
        if self.match == "code":
            assert passes is not None
            return passes(self.program(completion))
        if self.match == "contains":
            return any(_plain(answer) in _plain(completion) for answer in self.answers)
        if self.match in NUMBERS:
            found = _number(completion, last=self.match == "last_number")
            return found is not None and found in map(_number, self.answers)
        if self.match == "boxed":
            boxed = _last_boxed(completion)
            return boxed is not None and any(_same(boxed, answer) for answer in self.answers)
        if self.match == "choice":
            chosen = _first_choice(completion, self.choices)
            return chosen is not None and _plain(chosen) in map(_plain, self.answers)
        first_line = completion.strip().partition("\n")[0]
        return first_line.strip() in (answer.strip() for answer in self.answers)


def read_prompts(path: Path, match: Match, limit: int, *, within: Sequence[Path] | None = None) -> list[Prompt]:
    """Read the prompts of a task.

    Args:
        path: A JSON lines file: `prompt` (a text) or `messages`, `answer` (a text, a number or a list of them),
            `choices` where the match is `choice`, `tests` instead of `answer` where it is `code`, and `match` where it
            differs from the run's.
        match: How completions are judged where a record does not state it.
        limit: Largest number of prompts; the first ones are read.
        within: Directories below one of which the file must lie; None for any.

    Raises:
        InputError: The file cannot be read, or a record is no prompt; the text names the line.
    """
    with os_errors_as(InputError, f"cannot read the task {path}"):
        data = read_regular(path, MAX_BYTES, within=within)
    prompts: list[Prompt] = []
    for number, line in enumerate(data.splitlines(), 1):
        if len(prompts) == limit:
            break
        if line.strip():
            try:
                prompts.append(_prompt(line, match))
            except ValueError as error:
                raise InputError(f"{path}:{number} is no prompt of a task: {error}") from error
    if not prompts:
        raise InputError(f"the task {path} has no prompts")
    return prompts


def answered_prompt(
    record: Mapping[str, Any], match: Match, *, text: str = "", messages: Sequence[dict[str, str]] = ()
) -> Prompt:
    """Return a prompt with the answers of a record.

    Args:
        record: `answer` or `tests`, and `choices` and `match` where it has them.
        match: How completions are judged if the record does not state it.
        text: The prompt, if it is a text.
        messages: The prompt, if it is a conversation.

    Raises:
        ValueError: The answer cannot be judged by; the text is the reason.
    """
    chosen = record.get("match", match)
    if chosen not in get_args(Match):
        raise ValueError(f"match {chosen!r} is none of {', '.join(get_args(Match))}")
    answers, choices = tuple(_texts(record, "answer")), tuple(_texts(record, "choices"))
    tests = record.get("tests", "")
    if not isinstance(tests, str) or (chosen == "code") != bool(tests.strip()):
        raise ValueError("`tests`, a text, and match = code need each other")
    if bool(answers) == bool(tests):
        raise ValueError("it needs an `answer`, or `tests` where match = code")
    if (chosen == "choice") != bool(choices):
        raise ValueError("`choices` and match = choice need each other")
    if choices and not {*map(_plain, answers)} <= {*map(_plain, choices)}:
        raise ValueError("its answer is none of its choices")
    if chosen in NUMBERS and any(_number(answer) is None or len(NUMBER.findall(answer)) > 1 for answer in answers):
        raise ValueError("its answer is not one number: give the number alone")
    return Prompt(text, tuple(messages), answers, choices, chosen, tests)


def accuracy_of(
    prompts: Iterable[Prompt], completions: Iterable[Sequence[str]], passes: Callable[[str], bool] | None = None
) -> tuple[float, float]:
    """Return the fraction of completions that are right, and of prompts with a right completion.

    Args:
        prompts: Prompts of a task, at least one.
        completions: As many completions for each.
        passes: As of `Prompt.is_right`.
    """
    right = [
        [prompt.is_right(text, passes) for text in texts] for prompt, texts in zip(prompts, completions, strict=True)
    ]
    return sum(sum(each) / len(each) for each in right) / len(right), sum(map(any, right)) / len(right)


def _prompt(line: bytes, match: Match) -> Prompt:
    """Parse a record.

    Raises:
        ValueError: It is no prompt; the text is the reason.
    """
    record = _object(line)
    if unknown := sorted(record.keys() - KEYS):
        raise ValueError(f"unknown field {unknown[0]!r}; it may have {', '.join(sorted(KEYS))}")
    text, messages = record.get("prompt", ""), record.get("messages", [])
    if not isinstance(text, str) or bool(text) == bool(messages):
        raise ValueError("it needs either a `prompt` that is a text or `messages`")
    return answered_prompt(record, match, text=text, messages=tuple(_messages(messages)))


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair") from error
    return record


def _texts(record: Mapping[str, Any], key: str) -> Iterator[str]:
    values = record.get(key, [])
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
            raise ValueError(f"`{key}` takes a text, a number or a list of them")
        yield format(Decimal(repr(value)), "f") if isinstance(value, float) and math.isfinite(value) else str(value)


def _messages(messages: Any) -> Iterator[dict[str, str]]:
    for message in messages if isinstance(messages, list) else [None]:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError("`messages` takes a list of objects with `role` and `content`")
        yield {"role": message["role"], "content": message["content"]}


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _number(text: str, last: bool = False) -> Decimal | None:
    """Return the first number in a text, or the last one, without separators of thousands.

    A comma separates thousands only where every group behind the first has three digits, the first has one to three
    and no leading zero, and no other digit or comma with a digit follows; any other comma ends the number. A sign right
    behind a digit stands between two numbers.

    >>> _number("about 1,234.50 or 7"), _number("about 1,234.50 or 7.", last=True), _number("1e-05 metres")
    (Decimal('1234.50'), Decimal('7'), Decimal('0.00001'))
    >>> _number("1,2,3"), _number("May 5,2024"), _number("1,234,56")
    (Decimal('1'), Decimal('5'), Decimal('1'))
    """
    numbers = NUMBER.finditer(text)
    found = deque(numbers, maxlen=1).pop() if last and NUMBER.search(text) else next(numbers, None)
    if found is None or len(found[0]) > LONGEST_NUMBER:
        return None
    try:
        return Decimal(found[0].replace(",", "").replace("\N{MINUS SIGN}", "-"))
    except InvalidOperation:
        return None


def _last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` of a text; None if it is not closed, or there is none.

    >>> _last_boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}."), _last_boxed(r"\boxed{1")
    ('\\frac{1}{2}', None)
    """
    _, box, rest = text.rpartition(BOXED)
    depth = 1
    for at, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:at]
    return None


def _same(found: str, answer: str) -> bool:
    """Return True for two equal numbers, or equal texts but for spaces and case.

    >>> _same("1,000", "1000.0"), _same("x + 1", "X+1"), _same("7 apples", "7")
    (True, True, False)
    """
    whole = [NUMBER.fullmatch(text.strip()) for text in (found, answer)]
    if all(whole):
        return _number(found) == _number(answer)
    return "".join(found.casefold().split()) == "".join(answer.casefold().split())


def _first_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that comes first in a text, as whole words; the longer one where two begin together.

    >>> _first_choice("It is (b) New York", ("York", "New York"))
    'New York'
    """
    spans = []
    for choice in choices:
        words = r"\s+".join(map(re.escape, choice.split()))
        if (match := re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE)) is not None:
            spans.append((match.start(), -len(match[0]), choice))
    return min(spans)[2] if spans else None
