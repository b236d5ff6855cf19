"""Weight files of a Hugging Face directory: found by the names that transformers loads, and checked before use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from xtoken_core.errors import InputError
from xtoken_core.regular_files import read_json_object

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SUFFIX = ".safetensors"


def weight_files(directory: Path) -> list[Path]:
    """Return the files that the model is loaded from; other `.safetensors` files in the directory are ignored.

    Without an index and `model.safetensors`, all `.safetensors` files are returned.

    Raises:
        InputError: The index cannot be read, or names something else than a `.safetensors` file beside it.
    """
    index = directory / INDEX
    if not os.path.lexists(directory / WHOLE) and os.path.lexists(index):
        return [directory / name for name in _indexed(index)]
    if os.path.lexists(directory / WHOLE):
        return [directory / WHOLE]
    return sorted(directory.glob(f"*{SUFFIX}"))


def check_model_directory(directory: Path) -> None:
    """Refuse a directory with a FIFO, device or socket among its files: a library that opens it would block.

    Raises:
        InputError: It holds one, or its index of weights names files outside it.
    """
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    mode = entry.stat().st_mode
                except OSError:  # a broken link, which the library reports
                    continue
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise InputError(f"cannot read {entry.path}: it is not a regular file: remove it")
    except OSError:
        return
    weight_files(directory)


def _indexed(index: Path) -> list[str]:
    try:
        names = read_json_object(index)["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError("weight_map does not map names of tensors to names of files")
    except OSError as error:
        raise InputError(f"cannot read the index of weights {index}: {error.strerror}") from error
    except KeyError as error:
        raise InputError(f"the index of weights {index} is damaged: it has no weight_map") from error
    except ValueError as error:
        raise InputError(f"the index of weights {index} is damaged: {error}") from error
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or not name.endswith(SUFFIX) or not name.isprintable():
            raise InputError(
                f"the index of weights {index} names {name[:100]!r}: the files of a model must be {SUFFIX} files "
                "beside it"
            )
    return files
