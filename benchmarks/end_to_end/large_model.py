"""A model with random weights, written as fast as the disk takes it: larger than a GPU, or where there is none."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from xtoken_core.atomic import atomic_write

POOL_VALUES = 1 << 25
"""Maximum of values that are drawn; every matrix repeats them, each from another one on."""
SCALE = 0.02
"""Standard deviation of the values."""
THREADS = 8
ITEM = 2
"""Bytes of a value in bfloat16."""


def write_model(directory: Path, config: Any, seed: int) -> None:
    """Write a causal language model in bfloat16, one file per layer; vectors are 1, as norms are at the start.

    Args:
        directory: Is made if it is not there.
        config: A transformers configuration; a head that is tied is not written.
        seed: Of the values.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    largest = 0
    tied = id(model.get_output_embeddings()) if config.tie_word_embeddings else None
    heads = {f"{name}.weight" for name, module in model.named_modules() if id(module) == tied}
    for name, weight in model.state_dict().items():
        if name in heads:
            continue
        files.setdefault(_file_of(name), {})[name] = tuple(weight.shape)
        largest = max(largest, weight.numel())
    pool = torch.randn(min(POOL_VALUES, largest), generator=torch.Generator().manual_seed(seed)).mul_(SCALE).bfloat16()
    values = memoryview(pool.view(torch.uint8).numpy())
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(lambda file: _write_file(directory / file, files[file], values), files):
            pass
    weights = {name: file for file, shapes in files.items() for name in shapes}
    nbytes = sum(ITEM * math.prod(shape) for shapes in files.values() for shape in shapes.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": weights}
    atomic_write(directory / "model.safetensors.index.json", json.dumps(index) + "\n")
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(directory)


def _file_of(name: str) -> str:
    """Return the name of the file of a weight."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return f"model-{int(numbers[0]):05d}.safetensors" if numbers else "model-rest.safetensors"


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], values: memoryview) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = ITEM * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, shape in enumerate(shapes.values()):
            for part in _parts(shape, values, number):
                file.write(part)


def _parts(shape: tuple[int, ...], values: memoryview, number: int) -> Iterator[memoryview | bytes]:
    """Yield the bytes of a weight.

    Args:
        shape: Of the weight.
        values: Bytes of the values that are repeated.
        number: Of the weight in its file.
    """
    left = ITEM * math.prod(shape)
    if len(shape) == 1:
        yield b"\x80\x3f" * (left // ITEM)  # 1 in bfloat16
        return
    start = ITEM * (7919 * number) % len(values)
    while left:
        part = values[start : start + left]
        yield part
        left, start = left - len(part), 0
