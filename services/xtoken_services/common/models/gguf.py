"""Models in GGUF files, converted once to Hugging Face directories in the user's cache, in a child process.

`transformers` reads the file, and the weights are stored in float32, as the file's blocks decode.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_rename, sync_tree
from xtoken_core.errors import InputError, os_errors_as
from xtoken_core.user_cache import user_cache
from xtoken_services.common.processes.child_process import MEMORY_LIMIT, Progress, answer_requests, ask_child
from xtoken_services.common.processes.progress import spinner

SUFFIX = ".gguf"
CONVERSION_S = 3600.0
"""Seconds after which a conversion is killed."""
GROWTH = 32
"""Bytes of memory of a conversion per byte of the file: float32 is 16 times the smallest blocks, and is copied once."""
SAMPLE = "These are words that many people know"
"""Words that vocabularies of tens of thousands of tokens have."""
SPACES = ("\u2581", "\u0120")
"""A space before a word, as vocabularies write it: SentencePiece's, and byte-level BPE's."""


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def gguf_model(name: str, file: Path) -> Path:
    """Return the directory of a GGUF file's model, converted first if need be.

    Args:
        name: The setting, for messages.
        file: The file; one of another size or time of change is converted again.

    Raises:
        InputError: The package that reads it is not installed, or it cannot be converted.
    """
    status = file.stat()
    version = f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    target = user_cache() / "gguf" / f"{file.stem}-{hashlib.sha256(version.encode()).hexdigest()[:16]}"
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{name}: {file} is read by the package gguf: install it by pip install gguf")
    with os_errors_as(InputError, f"{name}: cannot keep the model of {file} in {target.parent}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        with spinner(f"converting {file.name}"):
            request = {"file": file, "directory": scratch}
            memory = MEMORY_LIMIT + GROWTH * status.st_size
            ask_child(__name__, request, silence_s=CONVERSION_S, memory=memory, threads=True)
        sync_tree(scratch)
        shutil.rmtree(target, ignore_errors=True)  # without a configuration: not whole
        atomic_rename(scratch, target)
    except InputError as error:
        raise InputError(f"{name}: cannot convert the GGUF file {file}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def check_merges(tokenizer: Any, file: Path) -> None:
    """Check that a converted tokenizer has kept its merges: words of its vocabulary are one token each.

    transformers 5.17 reads Gemma 3's file without some or all of them, and nothing fails later; 5.23 reads it right.

    Args:
        tokenizer: As it was converted.
        file: The GGUF file that it was read from.

    Raises:
        InputError: A word of the vocabulary is cut.
    """
    vocabulary = tokenizer.get_vocab()
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"])
    words = {f"{space}{word}" for word in SAMPLE.split()[1:] for space in SPACES}
    if cut := sorted(word for word in words & vocabulary.keys() if word not in tokens):
        import transformers

        raise InputError(
            f"transformers {transformers.__version__} reads the tokenizer of {file.name} without its merges, "
            f"{cut[0]!r} is in the vocabulary and is cut: convert the file with transformers 5.23 or newer"
        )


def main(request: dict[str, Any], _: Progress) -> None:
    """Convert the file of a request.

    Raises:
        InputError: The installed transformers does not read the file's tokenizer as it is.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, directory = Path(request["file"]), Path(request["directory"])
    options = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    check_merges(tokenizer, file)
    tokenizer.save_pretrained(directory)
    # Newer versions keep weights packed unless asked; older ones have no such class and always unpack.
    packing = getattr(transformers, "GgufConfig", None)
    unpacked = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options, **unpacked)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    embedding: Any = model.get_input_embeddings()
    drop_added_tokens(directory, embedding.num_embeddings)


def drop_added_tokens(directory: Path, rows: int) -> None:
    """Remove the tokens that `transformers` adds to a converted tokenizer, such as GPT-2's own end of text.

    The model has no row for them, so its tokenizer would have more ids than its head.

    Args:
        directory: The converted model.
        rows: Rows of its embedding.
    """
    file, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    document, config = (json.loads(path.read_text(encoding="utf-8")) for path in (file, settings))
    dropped = {token["content"] for token in document["added_tokens"] if token["id"] >= rows}
    if dropped:
        document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < rows]
        config = {name: value for name, value in config.items() if not (isinstance(value, str) and value in dropped)}
        file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        settings.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    answer_requests(main)
