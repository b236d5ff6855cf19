"""Attacks by files that a run names: models, tokenizers, projections and text that are not what they seem."""

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.attack.http_client import expect_refusal
from tests.attack.target import Attack, FaultError, Target

LONGEST_VALIDATION_S = 15.0
SECRET = "/etc/passwd"
PLANTED = ("json", "numpy", "safetensors", "sentencepiece", "tokenizers", "torch", "transformers", "xtoken_core")


def fifo(path: Path) -> None:
    """Put a FIFO where a file is."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_outside(path: Path) -> None:
    """Put a link to a file outside the roots."""
    path.unlink(missing_ok=True)
    path.symlink_to(SECRET)


def loop(path: Path) -> None:
    """Put a link to itself."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def directory(path: Path) -> None:
    """Put a directory where a file is."""
    path.unlink(missing_ok=True)
    path.mkdir()


def sparse(path: Path) -> None:
    """Make a file of 8 GiB that takes no room."""
    with path.open("wb") as file:
        file.truncate(8 << 30)


def nested(path: Path) -> None:
    """Write JSON of a hundred thousand levels."""
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def nothing(path: Path) -> None:
    """Empty the file."""
    path.write_bytes(b"")


NEVER = ("fifo", "link_outside", "loop", "directory", "huge_header", "false_shapes")
"""Kinds that must be refused before a run starts; text that is empty or odd is reported by the run itself."""
KINDS: tuple[Callable[[Path], None], ...] = (fifo, link_outside, loop, directory, sparse, nested, nothing)


def huge_header(path: Path) -> None:
    """Write a safetensors file whose header is longer than the file."""
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def false_shapes(path: Path) -> None:
    """Write a safetensors header with shapes that multiply beyond any file."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def check(target: Target, what: str, *, refused: bool, **changes: Any) -> None:
    """Let the control plane validate a run with these changes, which it must refuse if `refused`.

    Raises:
        FaultError: It fails, takes long, or reveals a file outside its roots.
    """
    spec = json.loads(json.dumps(target.spec))
    for name, value in changes.items():
        part, _, field = name.partition("__")
        (spec[part][0] if part == "teacher" else spec[part])[field] = str(value)
    spec["output"] = str(target.runs / f"hostile-{random.randbytes(4).hex()}")
    began = target.clock.now()
    with target.http() as http:
        response = http.post("/v1/runs", json=spec, params={"dry_run": "true"})
    expect_refusal(response, what)
    if "root:x:" in response.text:
        raise FaultError(f"{what}: the answer holds {SECRET}")
    if (seconds := target.clock.since(began)) > LONGEST_VALIDATION_S:
        raise FaultError(f"{what}: validation took {seconds:.1f} s")
    if refused and response.status_code == 200:
        raise FaultError(f"{what}: the run is accepted")


def copy_of(target: Target, part: str) -> Path:
    """Return a copy of the student's or the teacher's directory."""
    source = target.spec[part]["model"] if part == "student" else target.spec[part][0]["model"]
    return Path(shutil.copytree(source, target.scratch(part) / "model"))


def hostile_model_files(target: Target, rng: random.Random, seconds: float) -> None:
    """Replace one file of a model's directory."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        part, kind = rng.choice(("student", "teacher")), rng.choice((*KINDS, huge_header, false_shapes))
        model = copy_of(target, part)
        file = rng.choice(sorted(model.glob("*.json")) + sorted(model.glob("*.safetensors")))
        if file.name not in ("config.json", "tokenizer.json", "model.safetensors"):
            continue  # a file that is not read may be anything
        file.unlink()
        kind(file)
        check(
            target,
            f"{part}/{file.name} by {kind.__name__}",
            refused=kind.__name__ in NEVER,
            **{f"{part}__model": model},
        )
        shutil.rmtree(model.parent)


def hostile_indexes(target: Target, rng: random.Random, seconds: float) -> None:
    """Name shards that lie outside the model's directory or are no regular files."""
    del seconds
    secret = target.scratch("secret")
    for name in ("../../secret/x.safetensors", f"../../{secret.name}/x.safetensors", str(secret / "x.safetensors"),
                 "fifo", "link", ".", "", "a" * 5_000, "a\0b"):  # fmt: skip
        model = copy_of(target, "student")
        weights = model / "model.safetensors"
        shutil.copy(weights, secret / "x.safetensors")
        weights.unlink()
        os.mkfifo(model / "fifo")
        (model / "link").symlink_to(secret / "x.safetensors")
        index = {"weight_map": {f"w{rng.randrange(9)}": name}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        check(target, f"a shard named {name[:40]!r}", refused=True, student__model=model)
        shutil.rmtree(model.parent)
    shutil.rmtree(secret)


def hostile_text(target: Target, rng: random.Random, seconds: float) -> None:
    """Name text that is a FIFO, a link outside, a bomb or damaged."""
    end = time.monotonic() + seconds
    for kind in rng.sample([*KINDS, parquet_bomb, long_line], len(KINDS) + 2):
        if time.monotonic() > end:
            break
        folder = target.scratch("text")
        path = folder / ("train.parquet" if kind is parquet_bomb else "train.jsonl")
        kind(path)
        check(target, f"data.path by {kind.__name__}", refused=kind.__name__ in NEVER, data__path=path)
        shutil.rmtree(folder)


def parquet_bomb(path: Path) -> None:
    """Write a small file of one value, repeated to gigabytes."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1_500, pa.int32()), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"text": column}), path, compression="zstd", row_group_size=1_500)


def long_line(path: Path) -> None:
    """Write a line of 300 MB without an end."""
    with path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(300):
            file.write(b"x" * 1_000_000)


def hostile_projections(target: Target, rng: random.Random, seconds: float) -> None:
    """Name a projection that is no safetensors file."""
    end = time.monotonic() + seconds
    for kind in rng.sample([*KINDS, huge_header, false_shapes], len(KINDS) + 2):
        if time.monotonic() > end:
            break
        folder = target.scratch("projection")
        path = folder / "p.safetensors"
        kind(path)
        check(target, f"a projection by {kind.__name__}", refused=kind.__name__ in NEVER, teacher__projection=path)
        shutil.rmtree(folder)


def planted_modules(target: Target, rng: random.Random, seconds: float) -> None:
    """Put files named as modules into the working directory while runs are checked: none may be executed."""
    del seconds
    executed = target.directory / f"executed-{rng.randrange(1 << 30)}"
    planted = [target.working_directory / f"{name}.py" for name in PLANTED]
    try:
        for path in planted:
            path.write_text(f"open({str(executed)!r}, 'a').write({path.name + ' '!r})\n")
        for document in (target.spec, {**target.spec, "loss": {"mode": "chain", "vocab_topk": None}}):
            with target.http() as http:
                response = http.post("/v1/runs", params={"dry_run": True}, json=document)
            if not response.is_success:
                raise FaultError(f"a run is refused beside planted files: {response.text[:300]}")
        if executed.exists():
            raise FaultError(f"files of the working directory were executed: {executed.read_text()}")
    finally:
        for path in planted:
            path.unlink(missing_ok=True)


ATTACKS: dict[str, Attack] = {
    f"files.{attack.__name__}": attack
    for attack in (hostile_model_files, hostile_indexes, hostile_text, hostile_projections, planted_modules)
}
