"""The weights of a model directory, counted, checked and fingerprinted by its files, without loading any. No torch."""

from __future__ import annotations

import hashlib
import os
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from xtoken_core.config.spec import TeacherSpec
from xtoken_core.errors import InputError
from xtoken_core.model_files import weight_files
from xtoken_core.regular_files import MIB, descriptor_path, open_regular, read_regular
from xtoken_services.common.files.allowed_paths import readable_roots

ENDS = 1 << 20
"""Bytes hashed at each end of a file; with the size they catch all but an edit in the middle."""
CONFIG_LIMIT = 16 * MIB


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


def check_weights(what: str, directory: Path) -> None:
    """Check that weights exist and that their files are what their names say.

    Args:
        what: The model, as the error message names it.
        directory: A Hugging Face directory.

    Raises:
        InputError: There are none, or a file cannot be read.
    """
    files = weight_files(directory)
    if not files:
        raise InputError(
            f"the {what}'s directory {directory} holds no .safetensors weights: write them by `save_pretrained`"
        )
    for path in files:
        try:
            with descriptor_path(path, within=readable_roots()) as opened, safe_open(opened, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot read the {what}'s weights {path}: {reason}") from error


def weights_fingerprint(directory: Path) -> str:
    """Return a hash of the configuration and of every file's size and ends: fast, and different for other weights.

    Raises:
        OSError, InputError: A file cannot be read.
    """
    digest = hashlib.sha256(read_regular(directory / "config.json", CONFIG_LIMIT, within=readable_roots()))
    for path in weight_files(directory):
        descriptor = open_regular(path, within=readable_roots())
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            digest.update(f"{path.name} {size}\0".encode())
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()


def served_fingerprint(spec: TeacherSpec) -> str:
    """Return a hash of the configuration of a model that is served elsewhere, and of the name under which it is.

    Its addresses are no part of it: a run may resume with other servers of the same model.

    Raises:
        OSError, InputError: The configuration cannot be read.
    """
    digest = hashlib.sha256(read_regular(spec.model / "config.json", CONFIG_LIMIT, within=readable_roots()))
    digest.update(f"served {spec.url_engine} {spec.url_model or ''}".encode())
    return digest.hexdigest()
