"""Checks of records: the part to train on, or the reason why a record cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_RECORD_BYTES = 64 << 20
"""Limit of a record, which must be held in memory whole."""


@dataclass(frozen=True)
class Record:
    """One usable record.

    Attributes:
        number: Its number in the index, from 0.
        value: `{"text": str}`, with a `Piece` as `piece` if it is part of a document; or
            `{"prompt": str, "completion": str}`, or `{"messages": [{"role": str, "content": str, ...}, ...]}` with the
            record's `tools`, if it has some, and as `form` the name of the form that the messages had. With an `answer`
            also the `ANSWER_FIELDS` that the record has, unchecked, and in any case `FOR_TEACHERS` and `HAS_WEIGHT`.
            In a run with routes also a `Route` as `route`.
    """

    number: int
    value: dict[str, Any]

    @property
    def document(self) -> str:
        """The record as plain text: without a chat template."""
        if "text" in self.value:
            return str(self.value["text"])
        if "completion" in self.value:
            return str(self.value["prompt"]) + str(self.value["completion"])
        return "\n".join(message["content"] for message in self.value["messages"])


PREFIX = "teacher_prefix"
FOR_TEACHERS = ("teacher", PREFIX)
"""Fields of a record by which it chooses its teachers, and says what they alone read before its text."""
ANSWER_FIELDS = ("answer", "choices", "match")
"""Fields of a record by which a completion of its prompt is judged, see `xtoken_core.tasks`."""
WEIGHT, HAS_WEIGHT = "loss_multiplier", "has_loss_multiplier"
"""Field of a record that the Trainer integration reads and no run does, and the key of a value whose record has it."""
CHAT_COLUMNS = (("prompt", "completion"), ("messages",), ("conversations",), ("instruction", "output"))
"""Columns that make a conversation, the first that a record has: of TRL if both are lists, ours, ShareGPT, Alpaca."""
CHAT_EXTRAS = ("tools", "system", "input")
"""Columns beside them that are read."""
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
FORM = "form"
"""Key of a record's value beside `messages`: `TRL`, `ShareGPT` or `Alpaca`, if they were made of these."""
Document = str | Mapping[str, Any]
"""What an evaluation reads: a text, or a record's value with an answer, of which only the answer is scored."""
PIECE = "piece"
"""Key of a record's value beside `text`, if it is a `Piece` of a document."""


@dataclass(frozen=True)
class Piece:
    """A piece of a document that is several records.

    Attributes:
        first: It begins where the document does.
        last: It ends where the document does.
    """

    first: bool
    last: bool


ROUTE = "route"
"""Key of a record's value, if it is compared with some teachers only."""


@dataclass(frozen=True)
class Route:
    """Numbers of the teachers that compare a record."""

    teachers: tuple[int, ...]


@dataclass(frozen=True)
class BadRecord:
    """One record that cannot be trained on. It keeps its number.

    Attributes:
        number: Its number in the index, from 0.
        location: `file:line`, counted from 1 (a row for parquet and arrow files).
        reason: Why, in a few words.
    """

    number: int
    location: str
    reason: str


class UnusableRecordError(ValueError):
    """A record cannot be used; the text is the reason."""


class MissingFieldError(UnusableRecordError):
    """The record has neither the field nor prompt + completion nor messages."""


def decode_utf8(raw: bytes) -> str:
    """Decode UTF-8.

    Raises:
        UnusableRecordError: They are not UTF-8, or too many.
    """
    if len(raw) > MAX_RECORD_BYTES:
        raise UnusableRecordError(f"longer than {MAX_RECORD_BYTES >> 20} MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableRecordError(f"invalid UTF-8 at byte {error.start}") from error


def parse_json_line(line: str, field: str) -> dict[str, Any]:
    """Parse a line of a `.jsonl` file to a record's value.

    Raises:
        UnusableRecordError: It is not a JSON object with usable text.
    """
    if not line.strip():
        raise UnusableRecordError("empty line")
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnusableRecordError(f"invalid JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise UnusableRecordError("invalid JSON: nested too deeply or a number too long") from error
    if not isinstance(value, dict):
        raise UnusableRecordError(f"not a JSON object but {_json_kind(value)}")
    return usable_value(value, field)


def usable_value(row: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the part of a row that is trained on. A null counts as missing; whitespace alone is an empty text.

    Args:
        row: The record's columns.
        field: Column of the text. Without it, `prompt` and `completion` as texts, then `CHAT_COLUMNS`, are tried.

    Raises:
        MissingFieldError: The row has none of these.
        UnusableRecordError: It has, but not as text.
    """
    answered = row.get("answer") is not None
    wanted = [name for name in (*FOR_TEACHERS, *(ANSWER_FIELDS if answered else ())) if name != field]
    beside = {name: row[name] for name in wanted if row.get(name) is not None}
    beside |= {HAS_WEIGHT: True} if row.get(WEIGHT) is not None else {}
    if PREFIX in beside:
        beside[PREFIX] = _text(beside[PREFIX], PREFIX, may_be_empty=True)
    if row.get(field) is not None:
        return {"text": _text(row[field], field)} | beside
    pair = [row.get("prompt"), row.get("completion")]
    if None not in pair and not all(isinstance(part, list) for part in pair):
        prompt = _text(row["prompt"], "prompt", may_be_empty=True)
        return {"prompt": prompt, "completion": _text(row["completion"], "completion")} | beside
    for columns, form in zip(CHAT_COLUMNS, ("TRL", None, "ShareGPT", "Alpaca"), strict=True):
        if all(row.get(name) is not None for name in columns):
            messages = _messages(_MADE_FROM[form](row) if form else row["messages"])
            tools = {"tools": _tools(row["tools"])} if row.get("tools") else {}
            return {"messages": messages} | tools | ({FORM: form} if form else {}) | beside
    others = ", ".join(repr(name) for name in row if row[name] is not None)
    raise MissingFieldError((f"no field {field!r}" + f", only {others}" * bool(others))[:200])


def _from_sharegpt(row: Mapping[str, Any]) -> list[Any]:
    """Return the messages of `conversations`, whose turns have `from` and `value`, after an own `system`."""
    turns = row["conversations"] if isinstance(row["conversations"], list) else []
    messages: list[Any] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("from") is not None:
            if turn["from"] not in _SHAREGPT_ROLES:
                known = ", ".join(_SHAREGPT_ROLES)
                raise UnusableRecordError(f"turn {number} of the conversation is from {turn['from']!r}, not {known}")
            turn = {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}
        messages.append(turn)
    return messages


def _from_alpaca(row: Mapping[str, Any]) -> list[Any]:
    """Return the messages of an instruction with an optional input, and its output."""
    request = [_text(row[name], name) for name in ("instruction", "input") if row.get(name)]
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    turns = [{"role": "user", "content": "\n\n".join(request)}, {"role": "assistant", "content": row["output"]}]
    return messages + turns


_MADE_FROM = {"TRL": lambda row: row["prompt"] + row["completion"], "ShareGPT": _from_sharegpt, "Alpaca": _from_alpaca}


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a record: a list, or JSON of one."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UnusableRecordError("the field 'tools' is no JSON") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRecordError("the field 'tools' is not a list of objects")
    return [_without_none(tool) for tool in tools]


def _without_none(value: Any) -> Any:
    """Return a value without the nulls of objects: in a column, each object has the keys of all."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def loss_multiplier(row: Mapping[str, Any]) -> float:
    """Return a row's `loss_multiplier`; 1 where it is missing or null.

    Raises:
        UnusableRecordError: It is no weight.
    """
    value = row.get(WEIGHT)
    with suppress(TypeError, ValueError):
        if 0 <= (weight := 1.0 if value is None else float(value)) < float("inf"):
            return weight
    raise UnusableRecordError(f"loss_multiplier = {value!r:.40} is no number from 0 up")


def _text(value: Any, field: str, *, may_be_empty: bool = False) -> str:
    if isinstance(value, bytes):
        value = decode_utf8(value)
    if not isinstance(value, str):
        raise UnusableRecordError(f"the field {field!r} is not a string but {_json_kind(value)}")
    if len(value) > MAX_RECORD_BYTES:
        raise UnusableRecordError(f"longer than {MAX_RECORD_BYTES >> 20} MiB")
    if not may_be_empty and not value.strip():
        raise UnusableRecordError("empty text" if field != "completion" else "empty completion")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableRecordError(f"the field {field!r} holds half of a surrogate pair") from error
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UnusableRecordError("the field 'messages' is not a list with at least one message")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise UnusableRecordError(f"message {number} is not an object with role and content")
        kept = {key: item for key, item in message.items() if item is not None}
        if kept.get("tool_calls"):
            kept.setdefault("content", "")  # a call needs no words
        for part in ("role", "content"):
            if part not in kept:
                raise UnusableRecordError(f"message {number} has no {part}")
            kept[part] = _text(kept[part], part, may_be_empty=True)
        messages.append(kept)
    if not any(message["content"].strip() for message in messages):
        raise UnusableRecordError("empty text: no message has content")
    return messages


def _json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
