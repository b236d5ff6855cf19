"""The number of a model directory's weights, of each tensor, from file headers, without loading them. No torch."""

from __future__ import annotations

from math import prod
from pathlib import Path

from safetensors import safe_open

from xtoken_core.model_files import weight_files
from xtoken_core.regular_files import descriptor_path
from xtoken_services.common.files.allowed_paths import readable_roots


def weight_count(directory: Path) -> int:
    """Return the number of weights; raise as `weight_counts` does."""
    return sum(weight_counts(directory))


def weight_counts(directory: Path) -> list[int]:
    """Return the number of weights of each tensor.

    Raises:
        OSError, SafetensorError, InputError: A file cannot be read.
    """
    counts: list[int] = []
    for path in weight_files(directory):
        with descriptor_path(path, within=readable_roots()) as opened, safe_open(opened, framework="numpy") as file:
            counts += [prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 - no mapping
    return counts
