"""Loading models and tokenizers from Hugging Face directories, with errors that name the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from xtoken_core.config.spec import ModelSpec
from xtoken_core.errors import ConfigError, InputError

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def pick_device(wanted: str, rank: int) -> torch.device:
    """The device of a rank: `auto` takes a GPU where there is one.

    Raises:
        ConfigError: A GPU is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('workers.device = "cuda": torch sees no GPU here: use "cpu" or "auto"')
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def load_model(spec: ModelSpec, what: str, device: torch.device, directory: Path | None = None) -> PreTrainedModel:
    """A causal language model in its spec's dtype; only safetensors, never code from the directory.

    Raises:
        InputError: It cannot be loaded, or its head is narrower than the configuration says.
    """
    place = directory or spec.model
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=getattr(torch, spec.dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"cannot load the {what}'s model from {place}: {_first_line(error)}") from error
    model.to(device)  # type: ignore[arg-type]  # the stub's decorator loses `self`
    return model


def load_tokenizer(directory: Path, what: str) -> Any:
    """The tokenizer in a directory.

    Raises:
        InputError: It cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"cannot load the {what}'s tokenizer from {directory}: {_first_line(error)}") from error


def head_width(model: PreTrainedModel) -> int:
    """Rows of the model's head."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(head.weight.shape[0])


def pad_id(tokenizer: Any) -> int:
    """The id that fills padding: the tokenizer's own, or else its end-of-text token, or else 0."""
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            return value
    return 0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
