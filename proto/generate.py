"""Write `schema.json` and `golden/` from the message types.

Run `python proto/generate.py` after a change of the types; a test compares the files with what this would write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from xtoken_core.wire import Column, messages, object_column, pack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import BOUNDS
from xtoken_core.wire.columns import offsets_from_lengths
from xtoken_core.wire.errors import CODES

HERE = Path(__file__).parent
BINARY = {"description": "msgpack bin", "x-msgpack": "bin"}
SESSION = "5f1c0a2b3c4d5e6f708192a3b4c5d6e7"
TRAINER = "00112233445566778899aabbccddeeff"
IN = {"session": SESSION, "partition": "train"}


def _int64(*values: int) -> memoryview:
    return memoryview(b"".join(v.to_bytes(8, "little", signed=True) for v in values))


def _columns() -> dict[str, Column]:
    """Return two rows of every kind of column: token ids, one float each, and one object each."""
    return {
        "input_ids": Column("jagged", "int64", 2, (), _int64(11, 12, 13, 14, 15), offsets_from_lengths([3, 2])),
        "sample_mask": Column("dense", "float32", 2, (), memoryview(bytes.fromhex("0000803f00000000"))),
        "origin": object_column([{"file": "a.txt", "line": 7}, None]),
    }


Plain = list[tuple[str, m.Request | m.Reply]]
WithBuffers = list[tuple[str, m.Request | m.Reply, list[memoryview]]]


def _examples() -> WithBuffers:
    """Return name, message and buffers of every golden frame list; every message type occurs at least once."""
    plain = [*_sessions_and_samples(), *_runs_and_rings()]
    return [(name, message, []) for name, message in plain] + _with_columns()


def _sessions_and_samples() -> Plain:
    """Return messages about sessions, partitions and samples, which need no run."""
    task = m.TaskDef(name="train", requires=["input_ids"])
    run = m.RunDef(
        positions=1000, samples_per_step=8, block_size=4, span=24, teachers=1, ranks=1, slots=2, document=b"{}"
    )
    return [
        ("hello", m.Hello(id="a.1", versions=[1], name="trainer-0", role="trainer", incarnation=1)),
        ("hello_waiting", m.Hello(id="a.1", versions=[1], name="c-0", role="collator", incarnation=2, rank=1,
                                  silence_s=15.0, needs_run=True, wait_s=5.0)),
        ("hello_version_2", m.Hello(id="a.1", versions=[1, 2], name="trainer-0", role="trainer", incarnation=1)),
        ("welcome_version_2", m.Welcome(id="a.1", session=SESSION, version=2)),
        ("welcome", m.Welcome(id="a.1", session=SESSION, version=1)),
        ("welcome_memory_limit", m.Welcome(id="a.1", session=SESSION, version=2, memory_limit=1 << 30)),
        ("welcome_run", m.Welcome(id="a.1", session=SESSION, version=1, partition="train", run=b"{}")),
        ("heartbeat", m.Heartbeat(id="b.1", session=SESSION, phase="run", progress=42)),
        ("bye", m.Bye(id="a.9", session=SESSION)),
        ("ok", m.Ok(id="b.1")),
        ("empty", m.Empty(id="a.2")),
        ("error", m.Failure(id="a.2", code="rewound", message="the run was rewound to step 7",
                            detail={"step": 7, "rewinds": 2})),
        ("error_bad_frame", m.Failure(code="bad_frame", message="the header is no msgpack message")),
        ("open", m.OpenPartition(id="a.2", **IN, tasks=[task], volatile=["score"], max_attempts=5)),
        ("open_run", m.OpenPartition(id="a.2", **IN, tasks=[], run=run)),
        ("seal", m.Seal(id="a.3", **IN)),
        ("clear", m.Clear(id="a.4", **IN, ids=[7])),
        ("clear_everything", m.Clear(id="a.4", **IN, everything=True)),
        ("stored", m.Stored(id="a.5", room=1_000_000)),
        ("room", m.Room(id="a.6", **IN, bytes=65536, wait_s=5.0)),
        ("get", m.Get(id="a.7", **IN, ids=[8, 9], fields=["input_ids"], wait_s=1.5)),
        ("claim", m.Claim(id="a.8", **IN, task="train", count=2, fields=["input_ids"], wait_s=5.0)),
        ("claim_ids", m.Claim(id="a.8", **IN, task="train", ids=[8, 9])),
        ("claimed_dead", m.Claimed(id="a.8", lease=0, ids=[], dead=[8, 9])),
        ("claimed_slot", m.Claimed(id="a.8", lease=4, ids=[8, 9], slot=1, generation=3)),
        ("claimed_slots", m.Claimed(id="a.24", lease=5, ids=[8, 9],
                                    slots=[m.SlotRef(teacher=0, ring=1, slot=0, generation=3)])),
        ("already_done", m.AlreadyDone(id="a.8")),
        ("ack", m.Ack(id="a.10", **IN, task="train", ids=[8, 9])),
        ("nack", m.Nack(id="a.11", **IN, lease=4, ids=[9], reason="not valid UTF-8")),
        ("list", m.ListSamples(id="a.12", **IN, task="train", state="ready", after=7, limit=100)),
        ("listed", m.Listed(id="a.12", ids=[8, 9], reasons={9: "not valid UTF-8"})),
        ("peek", m.Peek(id="a.13", **IN, sample=8)),
        ("peeked", m.Peeked(id="a.13", fields={"input_ids": 24}, status={"train": "leased"}, attempts=0)),
        ("stats", m.Stats(id="a.14", session=SESSION)),
        ("stats_reply", m.StatsReply(id="a.14", document=b"{}")),
    ]  # fmt: skip


def _runs_and_rings() -> Plain:
    """Return messages about a run's positions, steps and rings."""
    return [
        ("lease_block", m.LeaseBlock(id="a.15", **IN, wait_s=5.0)),
        ("block", m.Block(id="a.15", lease=1, first=8, count=4)),
        ("window", m.Window(id="a.16", **IN, step=1, rewinds=1, fields=["input_ids"], wait_s=5.0)),
        ("await_trainer", m.AwaitTrainer(id="a.17", **IN, rank=0, wait_s=5.0)),
        ("trainer", m.Trainer(id="a.17", trainer=TRAINER, step=1, rewinds=1)),
        ("announce_ring", m.AnnounceRing(id="a.18", **IN, teacher=0, rank=0, trainer=TRAINER, handle=b"\x01\x02")),
        ("await_ring", m.AwaitRing(id="a.19", **IN, teacher=0, wait_s=5.0)),
        ("ring", m.Ring(id="a.19", ring=1, handle=b"\x01\x02")),
        ("opened_ring", m.OpenedRing(id="a.20", **IN, teacher=0, ring=1)),
        ("await_opened", m.AwaitOpened(id="a.21", **IN, ring=1, wait_s=5.0)),
        ("claim_slot", m.ClaimSlot(id="a.22", **IN, ring=1, rewinds=1, ids=[8, 9], fields=["input_ids"], wait_s=5.0)),
        ("complete_slot", m.Complete(id="a.23", **IN, lease=4)),
        ("claim_batch", m.ClaimBatch(id="a.24", **IN, rewinds=1, ids=[8, 9], fields=["input_ids"], wait_s=5.0)),
        ("release", m.Release(id="a.25", **IN, ring=1, slot=0, generation=3)),
        ("check_step", m.CheckStep(id="a.26", **IN, step=1, rewinds=1, dead=[9])),
        ("verdict", m.Verdict(id="a.26", redo=False)),
        ("ack_window", m.AckWindow(id="a.27", **IN, step=1, rewinds=1)),
        ("rewind", m.Rewind(id="a.28", **IN, step=7, skipped={3: "empty document"}, dead={})),
        ("rewound", m.Rewound(id="a.28", rewinds=2)),
        ("publish", m.Publish(id="a.30", **IN, step=7, rewinds=2, tag=5)),
        ("block_of_prompts", m.Block(id="a.15", lease=2, first=12, count=4, version=1, tag=5)),
        ("give_up", m.Giveup(id="a.29", **IN, reason="record 17 is not valid UTF-8")),
    ]  # fmt: skip


def _with_columns() -> WithBuffers:
    """Return messages that carry columns."""
    heads, buffers = pack_columns(_columns())
    # Version 1 of the protocol: one map per sample.
    place = object_column([{"ring": 1, "slot": 0, "row": row, "generation": 3} for row in range(2)])
    place_heads, place_buffers = pack_columns({"teacher_full_logits_ipc": place})
    return [
        ("put", m.Put(id="a.5", **IN, ids=[8, 9], columns=heads), buffers),
        ("put_block", m.Put(id="a.5", **IN, ids=[8, 9], columns=heads, lease=1,
                            tombstones={10: "empty document", 11: "not valid UTF-8"}), buffers),
        ("rows", m.Rows(id="a.7", ids=[8, 9], columns=heads), buffers),
        ("claimed", m.Claimed(id="a.8", lease=4, ids=[8, 9], columns=heads), buffers),
        ("complete", m.Complete(id="a.9", **IN, lease=4, columns=heads), buffers),
        ("window_rows", m.WindowRows(id="a.16", ids=[8, 9], skipped=[10, 11], columns=heads), buffers),
        ("claimed_batch", m.Claimed(id="a.24", lease=5, ids=[8, 9], columns=place_heads), place_buffers),
    ]  # fmt: skip


def golden() -> dict[str, str]:
    """Return the text of every golden file, by name: header and frames of one message."""
    files = {}
    for name, message, buffers in _examples():
        document = {
            "direction": "request" if isinstance(message, m.Request) else "reply",
            "header": _shown(msgspec.to_builtins(message, builtin_types=(bytes,))),
            "frames": [frame.hex() for frame in (m.encode(message), *(bytes(buffer) for buffer in buffers))],
        }
        files[name + ".json"] = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    return files


def _shown(value: Any) -> Any:
    """Return a header in readable form: bytes as `{"bin": hex}`, integer keys as text."""
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    if isinstance(value, dict):
        return {str(key): _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value


def schema() -> str:
    """Return the JSON Schema of every header, as text."""
    requests = list(m.AnyRequest.__args__)
    replies = list(m.AnyReply.__args__)
    _, components = msgspec.json.schema_components([*requests, *replies], ref_template="#/$defs/{name}")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Headers of the transfer queue's protocol, version {messages.VERSION}",
        "description": "Bytes are msgpack bin and have no JSON type; keys of maps of ids are msgpack integers.",
        "x-version": messages.VERSION,
        "x-codes": list(CODES),
        "x-bounds": BOUNDS,
        "oneOf": [{"$ref": "#/$defs/Request"}, {"$ref": "#/$defs/Reply"}],
        "$defs": {
            "Request": {"oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in requests]},
            "Reply": {"oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in replies]},
            **{name: _without_base64(part) for name, part in sorted(components.items())},
        },
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _without_base64(part: Any) -> Any:
    """Replace base64 text, which JSON uses for bytes, by msgpack bin."""
    if isinstance(part, dict):
        if part.get("contentEncoding") == "base64":
            return dict(BINARY)
        return {
            key: value if key == "default" else _without_base64(value)
            for key, value in part.items()
            if not (key == "default" and value == "" and part.get("contentEncoding"))
        }
    return [_without_base64(item) for item in part] if isinstance(part, list) else part


def main() -> None:
    """Write the files, and remove golden ones without an example."""
    (HERE / "schema.json").write_text(schema(), encoding="utf-8")
    folder, files = HERE / "golden", golden()
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
