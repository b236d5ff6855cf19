"""The files in `proto/` say what the message types say, and every frame of them means what its header shows."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import msgspec
import pytest

from tests.contract import reference_client
from xtoken_core.wire import messages, unpack_columns
from xtoken_core.wire.bounds import BOUNDS
from xtoken_core.wire.errors import CODES
from xtoken_core.wire.messages import decode_reply, decode_request, encode

PROTO = Path(__file__).parents[2] / "proto"
MADE = runpy.run_path(str(PROTO / "generate.py"))
GOLDEN = sorted(path.name for path in (PROTO / "golden").glob("*.json"))
README = (PROTO / "README.md").read_text(encoding="utf-8")
TYPES = {str(kind.__struct_config__.tag) for kind in (*messages.AnyRequest.__args__, *messages.AnyReply.__args__)}


def load(name: str) -> tuple[dict[str, Any], list[bytes]]:
    document = json.loads((PROTO / "golden" / name).read_text(encoding="utf-8"))
    return document, [bytes.fromhex(frame) for frame in document["frames"]]


def test_schema_is_in_step() -> None:
    assert (PROTO / "schema.json").read_text(encoding="utf-8") == MADE["schema"]()


def test_golden_files_are_in_step() -> None:
    assert {name: (PROTO / "golden" / name).read_text(encoding="utf-8") for name in GOLDEN} == MADE["golden"]()


@pytest.mark.parametrize("kind", (*messages.AnyRequest.__args__, *messages.AnyReply.__args__), ids=lambda k: k.__name__)
def test_messages_take_keywords_only(kind: type[msgspec.Struct]) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind("a")


def test_every_message_has_a_golden_file() -> None:
    assert {load(name)[0]["header"]["type"] for name in GOLDEN} == TYPES


def test_the_document_names_every_message_and_code() -> None:
    assert [name for name in sorted(TYPES) if f"`{name}`" not in README] == []
    assert [code for code in CODES if f"`{code}`" not in README] == []


def test_the_document_names_every_field() -> None:
    kinds = (*messages.AnyRequest.__args__, *messages.AnyReply.__args__, messages.TaskDef, messages.RunDef)
    fields = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    quoted = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", README))))
    assert sorted(fields - quoted) == []


def test_the_document_lists_every_bound() -> None:
    table = re.findall(r"^\| `([a-z_]+)` \| ([0-9,]+) \|", README, re.MULTILINE)
    listed = {name: int(value.replace(",", "")) for name, value in table}
    assert listed == BOUNDS


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_decode_and_encode(name: str) -> None:
    document, (header, *buffers) = load(name)
    decode = decode_request if document["direction"] == "request" else decode_reply
    message = decode(header)
    assert encode(message) == header
    heads = getattr(message, "columns", [])
    columns = unpack_columns(heads, buffers)
    assert set(columns) == {head.name for head in heads}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_headers_fit_the_schema(name: str) -> None:
    document, (header, *_) = load(name)
    schema = json.loads((PROTO / "schema.json").read_text(encoding="utf-8"))
    plain = msgpack.unpackb(header, raw=False, strict_map_key=False)
    kind = "Request" if document["direction"] == "request" else "Reply"
    jsonschema.Draft202012Validator({**schema, "oneOf": [{"$ref": f"#/$defs/{kind}"}]}).validate(_json_keys(plain))


def test_schema_refuses_an_unknown_key() -> None:
    schema = json.loads((PROTO / "schema.json").read_text(encoding="utf-8"))
    strange = {"type": "bye", "id": "a.1", "session": "s", "really": True}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(strange)


@pytest.mark.parametrize("name", [name for name in GOLDEN if len(load(name)[1]) > 1])
def test_reference_client_reads_and_writes_golden_frames(name: str) -> None:
    _, (header, *buffers) = load(name)
    heads = msgpack.unpackb(header, raw=False, strict_map_key=False)["columns"]
    columns = reference_client.unpack(heads, buffers)
    assert reference_client.pack(columns) == (heads, buffers)


def _json_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_keys(item) for key, item in value.items()}
    return [_json_keys(item) for item in value] if isinstance(value, list) else value
