"""First inputs of each fuzz target: valid ones, made from the golden messages and from what the queue itself writes."""

import base64
import json
from pathlib import Path

import msgspec

from tests.fuzz.targets import RUN, Peers, joined
from xtoken_core.wire import messages as m
from xtoken_core.wire import pack_columns
from xtoken_core.wire.columns import Column, ColumnHead, offsets_from_lengths
from xtoken_core.wire.objects import object_column
from xtoken_services.queue import log_records as records

ROOT = Path(__file__).parents[2]
BREAKING = {"frames": ["OwCDpHR5cGWjo2EuOadzZXNzaW9u2SA1ZgEAAAAyYjNjNDJhM2I0YzVRNmU3"]}
"""Inputs that broke a target before it was mended, in base64."""


def packed(columns: dict[str, Column]) -> tuple[list[ColumnHead], list[bytes]]:
    heads, buffers = pack_columns(columns)
    return heads, [bytes(buffer) for buffer in buffers]


def sample_columns() -> dict[str, Column]:
    """One column of each kind, two rows each."""
    return {
        "input_ids": Column("jagged", "int64", 2, (), memoryview(bytes(24)), offsets_from_lengths([1, 2])),
        "sample_mask": Column("dense", "bool", 2, (), memoryview(b"\0\1")),
        "scores": Column("dense", "float16", 2, (3, 1), memoryview(bytes(12))),
        "origin": object_column([{"file": "a", "line": [1, None]}, 2.5]),
    }


def frames() -> list[bytes]:
    """The golden messages, each alone, and the requests one after the other for both kinds of partition."""
    alone, requests = [], []
    for path in sorted((ROOT / "proto" / "golden").glob("*.json")):
        document = json.loads(path.read_text())
        message = [bytes.fromhex(frame) for frame in document["frames"]]
        alone.append(joined(message))
        if document["direction"] == "request" and document["header"]["type"] not in ("bye", "hello"):
            requests.append(message)
    together = [
        joined([piece.replace(b"train", name) for message in requests for piece in (*message, b"")])
        for name in (b"plain", b"a_run")
    ]
    return [*alone, *together, *pipelines(), *map(base64.b64decode, BREAKING["frames"])]


def pipelines() -> list[bytes]:
    """Sequences of requests that reach the later states of both kinds of partition."""
    heads, buffers = packed(sample_columns())
    plain, a_run = {"session": "s", "partition": "plain"}, {"session": "s", "partition": "a_run"}
    tasks: list[tuple[m.Request, list[bytes]]] = [
        (m.Put(id="a.1", ids=[1, 2], columns=heads, **plain), buffers),
        (m.Claim(id="a.2", task="train", count=1, fields=["input_ids"], **plain), []),
        (m.Nack(id="a.3", lease=1, ids=[1], reason="no", **plain), []),
        (m.Claim(id="a.4", task="train", ids=[1, 2], **plain), []),
        (m.Complete(id="a.5", lease=2, columns=heads[:2], **plain), buffers[:3]),
        (m.Get(id="a.6", ids=[2], fields=["origin"], **plain), []),
        (m.Clear(id="a.7", everything=True, **plain), []),
    ]
    four, values = packed({"input_ids": Column("dense", "int32", 4, (), memoryview(bytes(16)))})
    run: list[tuple[m.Request, list[bytes]]] = [
        (m.Rewind(id="b.1", step=0, **a_run), []),
        (m.LeaseBlock(id="b.2", **a_run), []),
        (m.Put(id="b.3", ids=[0, 1, 2, 3], lease=1, columns=four, **a_run), values),
        (m.AnnounceRing(id="b.4", teacher=0, rank=0, trainer="s", handle=b"h", **a_run), []),
        (m.AwaitRing(id="b.5", teacher=0, **a_run), []),
        (m.OpenedRing(id="b.6", teacher=0, ring=1, **a_run), []),
        (m.Window(id="b.7", step=0, rewinds=1, fields=["input_ids"], **a_run), []),
        (m.ClaimSlot(id="b.8", ring=1, rewinds=1, ids=[0, 1, 2, 3], **a_run), []),
        (m.Complete(id="b.81", lease=2, **a_run), []),
        (m.ClaimBatch(id="b.82", rewinds=1, ids=[0, 1, 2, 3], fields=["input_ids"], **a_run), []),
        (m.Release(id="b.83", ring=1, slot=0, generation=1, **a_run), []),
        (m.CheckStep(id="b.84", step=0, rewinds=1, **a_run), []),
        (m.AckWindow(id="b.85", step=0, rewinds=1, **a_run), []),
    ]
    return [
        joined([piece for request, after in sequence for piece in (m.encode(request), *after, b"")])
        for sequence in (tasks, run)
    ]


def columns() -> list[bytes]:
    """All kinds of column together, and each alone."""
    every = sample_columns()
    out = []
    for some in (every, *({name: column} for name, column in every.items())):
        heads, buffers = packed(some)
        out.append(joined([msgspec.msgpack.encode(heads), *buffers]))
    return out


def journal() -> list[bytes]:
    """Every type of record, the snapshot of an engine, and places of a journal to damage."""
    heads, buffers = packed(sample_columns())
    plain = m.OpenPartition(
        id="o", session="s", partition="p", tasks=[m.TaskDef(name="t", requires=["input_ids"], order="arrival")]
    )
    run = m.OpenPartition(id="o", session="s", partition="r", tasks=[], run=RUN)
    entries: list[tuple[records.Record, list[bytes]]] = [
        (records.Opened(partition="p", definition=plain), []),
        (records.Finished(partition="p", intervals=[(10, 20), (30, 31)]), []),
        (records.Rows(partition="p", ids=[1, 2], columns=heads), buffers),
        (records.Rows(partition="p", ids=[3, 4], columns=heads, task="t", gone=[3]), buffers),
        (records.Refused(partition="p", ids=[1], reason="no", times=2), []),
        (records.Done(partition="p", task="t", ids=[2]), []),
        (records.Cleared(partition="p", ids=[1]), []),
        (records.Sealed(partition="p"), []),
        (records.Cleared(partition="p", everything=True), []),
        (records.Opened(partition="r", definition=run), []),
        (records.BlockRows(partition="r", ids=[0, 1], tombstones={2: "a", 3: "b"}, columns=heads), buffers),
        (records.BlockRefused(partition="r", block=1, reason="no", times=3), []),
        (records.Refused(partition="r", ids=[0], reason="no", times=3), []),
        (records.AtStep(partition="r", step=1, acked=True), []),
        (records.AtStep(partition="r", step=2, skipped={2: "a"}, dead={5: "d"}), []),
        (records.GivenUp(partition="r", reason="enough"), []),
    ]
    bodies = [joined([msgspec.msgpack.encode(head), *after]) for head, after in entries]
    state = [joined([msgspec.msgpack.encode(head), *after]) for head, after in records.snapshot(Peers().engine)]
    damages = [joined([at.to_bytes(4, "little") + bytes(3)]) for at in (0, 60, 5000, 9000, 20_000, -1 % (1 << 32))]
    return [b"\1" + joined(part) for part in (bodies[:9], bodies[9:], bodies, state)] + [b"\0" + one for one in damages]


def index() -> list[bytes]:
    """Indexes that are accepted and refused."""
    maps: list[object] = [
        {"a": "x.safetensors", "b": "y.safetensors"},
        {"a": "../x.safetensors"},
        {"a": "x\n.safetensors"},
        {"a": 1},
        [],
        {},
    ]
    return [json.dumps({"metadata": {"total_size": 4}, "weight_map": one}).encode() for one in maps]


def run_file() -> list[bytes]:
    """The example runs, and small tables of each section."""
    examples = [path.read_bytes() for path in sorted((ROOT / "deploy" / "examples").glob("*.toml"))]
    short = b"""name = "r"
output = "o"
teacher = [{model = "t", device = "cpu", projection = "p.pt"}]
student = {model = "s", adapter = "lora"}
data = {path = ["a", "b"], text = "t"}
loss = {mode = "gold", temperature = 1e0}
train = {max_steps = 0x10, samples_per_step = 4, learning_rate = 1e-4}
workers = {launcher = "ray", device = "cuda"}
"""
    return [*examples, short]


SEEDS = {"frames": frames, "columns": columns, "journal": journal, "index": index, "run_file": run_file}
