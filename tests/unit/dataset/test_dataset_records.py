"""Which records can be used, and what is said of the others."""

import json

import pytest

from tests.support.cases import cases
from xtoken_core.dataset.records import (
    MAX_RECORD_BYTES,
    MissingFieldError,
    UnusableRecordError,
    decode_utf8,
    parse_json_line,
    usable_value,
)

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "tool_calls": None}]


@cases(
    "record, value",
    ({"text": " a ", "other": 1}, {"text": " a "}),
    ({"prompt": "", "completion": "c"}, {"prompt": "", "completion": "c"}),
    ({"text": None, "prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "c"}),
    ({"text": "t", "messages": CHAT}, {"text": "t"}),
    ({"messages": CHAT}, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}),
    (
        {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
        {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
    ),
    ({"text": "a", "answer": 0, "match": None, "choices": ["b"]}, {"text": "a", "answer": 0, "choices": ["b"]}),
    ({"prompt": "p", "completion": "c", "answer": "c"}, {"prompt": "p", "completion": "c", "answer": "c"}),
    ({"messages": CHAT[:1], "answer": ["x"]}, {"messages": CHAT[:1], "answer": ["x"]}),
    ({"text": "a", "answer": None, "match": "number"}, {"text": "a"}),
    ids=[
        "text", "prompt", "null-is-missing", "field-first", "messages", "call-without-words", "answer",
        "answer-beside-completion", "answer-beside-messages", "match-alone",
    ],
)  # fmt: skip
def test_usable_records(record: dict, value: dict) -> None:
    assert parse_json_line(json.dumps(record), "text") == value


@cases(
    "line, reason",
    ("", "empty line"),
    ("  \t", "empty line"),
    ("{", r"invalid JSON: .* \(column 2\)"),
    ('["a"]', "not a JSON object but a list"),
    ("[" * 100_000, "nested too deeply"),
    ('{"n": ' + "9" * 5000 + "}", "number too long"),
    ('{"text": 3}', "not a string but a number"),
    ('{"text": true}', "not a string but a boolean"),
    ('{"text": ["a"]}', "not a string but a list"),
    ('{"text": " \\n\\u00a0\\u3000"}', "empty text"),
    ('{"text": "\\ud83d"}', "half of a surrogate pair"),
    ('{"prompt": "p", "completion": ""}', "empty completion"),
    ('{"messages": []}', "not a list with at least one message"),
    ('{"messages": ["hi"]}', "message 0 is not an object"),
    ('{"messages": [{"role": "user"}]}', "message 0 has no content"),
    ('{"messages": [{"role": "user", "content": " "}]}', "no message has content"),
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_unusable_records_say_why(line: str, reason: str) -> None:
    with pytest.raises(UnusableRecordError, match=reason):
        parse_json_line(line, "text")


@pytest.mark.parametrize("record", [{"body": "x"}, {"prompt": "p"}, {"text": None}])
def test_a_missing_field_is_told_apart(record: dict) -> None:
    with pytest.raises(MissingFieldError, match="no field 'text'"):
        usable_value(record, "text")


def test_surrogate_pairs_written_as_escapes_are_whole_characters() -> None:
    assert parse_json_line('{"text": "\\ud83d\\ude00"}', "text") == {"text": "\N{GRINNING FACE}"}


def test_too_long_a_record_is_refused() -> None:
    with pytest.raises(UnusableRecordError, match="longer than 64 MiB"):
        decode_utf8(bytes(MAX_RECORD_BYTES + 1))
