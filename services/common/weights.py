"""Facts of a model directory's weights from file headers, without loading them. No torch."""

from __future__ import annotations

import hashlib
import json
from math import prod
from pathlib import Path

from safetensors import safe_open

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
ENDS = 1 << 20
"""Bytes hashed at each end of a file; with the size they catch all but an edit in the middle."""


def weight_files(directory: Path) -> list[Path]:
    """Return the files that the model is loaded from; other `.safetensors` files in the directory are ignored."""
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        return [directory / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted(directory.glob("*.safetensors"))


def weight_count(directory: Path) -> int:
    """Return the number of weights.

    Raises:
        OSError, SafetensorError: A file cannot be read.
    """
    count = 0
    for path in weight_files(directory):
        with safe_open(path, framework="numpy") as file:
            count += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return count


def weights_fingerprint(directory: Path) -> str:
    """Return a hash of the configuration and of every file's size and ends: fast, and different for other weights.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()
