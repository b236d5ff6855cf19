"""Stores of a teacher's output: `python -m benchmarks.store --model DIR --text FILE [--out FILE]`.

A real model's hidden states and largest logits of a text, as `xtoken store build` keeps them: bytes per token beside
the values without compression, and the rates of writing (packed by one thread, with fsync) and of reading (mapped,
checksums verified, by one thread). The result goes to `benchmarks/results/store.json`.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import command_line, write_result
from xtoken_core.data_plane.buffers import array_of
from xtoken_core.teacher_store.codec import pack
from xtoken_core.teacher_store.identity import StoreIdentity
from xtoken_core.teacher_store.store import TeacherStore, empty_values, parts_of
from xtoken_core.teacher_store.writing import ShardWriter
from xtoken_core.transports.ring import TOPK_SCALARS, TopKSettings
from xtoken_services.teacher.prepare import TeacherModel

LENGTH = 256
KS = (16, 64, 256)
SHARD_BYTES = 64 << 20
ROUNDS = 3


def texts(tokenizer: Any, file: Path, tokens: int) -> Iterator[torch.Tensor]:
    """Yield the ids of a text in pieces of `LENGTH` tokens."""
    ids = tokenizer(file.read_text(encoding="utf-8")[: 8 * tokens])["input_ids"][:tokens]
    for start in range(0, len(ids) - LENGTH + 1, LENGTH):
        yield torch.tensor([ids[start : start + LENGTH]])


def outputs(
    model: TeacherModel, pieces: list[torch.Tensor], vocab: int, dtype: torch.dtype
) -> dict[str, list[np.ndarray]]:
    """Return a model's output for every piece, by its name: `[tokens, width]` each.

    Computed in float32, which a processor without half-precision units does faster, and rounded to `dtype`, as are the
    logits and hidden states of a teacher that computes in it.
    """
    made: dict[str, list[np.ndarray]] = {}
    for ids in pieces:
        hidden = torch.empty(1, LENGTH, model.head.shape[1], dtype=model.head.dtype)
        model.write_hidden(ids, hidden, None)
        made.setdefault("hidden", []).append(array_of(hidden[0].to(dtype)))
        largest = torch.empty(1, LENGTH, 2 * max(KS) + TOPK_SCALARS)
        model.write_topk(ids, largest, TopKSettings(max(KS), vocab))
        for k in KS:  # logits come largest first; the values beside them do not change a byte of the size
            values, ids_of = largest[0, :, :k].to(dtype).float(), largest[0, :, max(KS) : max(KS) + k]
            row = torch.cat([values, ids_of, largest[0, :, 2 * max(KS) :]], dim=-1)
            made.setdefault(f"topk {k}", []).append(row.numpy())
    return made


def measure(identity: StoreIdentity, values: list[np.ndarray]) -> dict[str, Any]:
    """Return sizes and rates of a store of these values."""
    tokens = sum(map(len, values))
    raw = sum(array.nbytes for array in values)
    writing, packing, reading = [], [], []
    for _ in range(ROUNDS):
        directory = Path(tempfile.mkdtemp(prefix="store-", dir=Path.cwd()))
        try:
            store = TeacherStore.create(str(directory), identity)
            writer = ShardWriter(store.files, SHARD_BYTES)
            began = time.perf_counter()
            for record, array in enumerate(values):
                frame = pack(np.ascontiguousarray(part) for part in parts_of(array, identity))
                writer.add(record, len(array), "", frame)
            packing.append(time.perf_counter() - began)
            writer.flush()
            writing.append(time.perf_counter() - began)
            store.refresh()
            size = store.nbytes
            out = empty_values(identity, LENGTH)
            began = time.perf_counter()
            for record in range(len(values)):
                store.read_into(record, out)
            reading.append(time.perf_counter() - began)
            assert out.tobytes() == values[-1].tobytes(), "a store returns every bit"
        finally:
            shutil.rmtree(directory)
    return {
        "tokens": tokens,
        "bytes_per_token_raw": raw / tokens,
        "bytes_per_token": size / tokens,
        "pack_tokens_per_second": tokens / min(packing),
        "write_tokens_per_second": tokens / min(writing),
        "read_tokens_per_second": tokens / min(reading),
    }


def main() -> None:
    """Measure, and write the result file."""
    parser = command_line(__doc__, "store")
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--tokens", type=int, default=4096)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    loaded = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model, vocab = TeacherModel(loaded), len(tokenizer)
    pieces = list(texts(tokenizer, given.text, given.tokens))
    made = outputs(model, pieces, vocab, torch.bfloat16)
    base: dict[str, Any] = {
        "text": "", "records": len(pieces), "append_eos": False, "tokenizer": "", "context_length": LENGTH,
        "model": "", "dtype": "bfloat16", "vocab_size": vocab,
    }  # fmt: skip
    forms: dict[str, dict[str, Any]] = {}
    torch.set_num_threads(1)  # rates are those of one thread
    for name, values in made.items():
        k = int(name.partition(" ")[2] or 0)
        content: dict[str, Any] = {"content": "topk", "topk": k}
        if not k:
            content = {"content": "hidden", "hidden_size": values[0].shape[1]}
        forms[name] = measure(StoreIdentity(**base, **content), values)
        size, raw = forms[name]["bytes_per_token"], forms[name]["bytes_per_token_raw"]
        print(f"{name}: {size:.1f} of {raw:.1f} bytes per token")
    result = {
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "versions": {"torch": version("torch"), "numpy": version("numpy"), "python": platform.python_version()},
        "model": given.model.name,
        "text": given.text.name,
        "vocabulary": vocab,
        "dtype": "bfloat16",
        "load_average": os.getloadavg()[0],
        "forms": forms,
    }
    write_result(given.out, result)


if __name__ == "__main__":
    main()
