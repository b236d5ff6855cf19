"""First check of a run's input files: whether they exist. It loads nothing heavy, so errors are reported at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_core.projection.fingerprint import projection_header, tokenizer_files
from xtoken_core.regular_files import read_json_object

LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 1 << 12),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 1 << 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 14),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "n_inner", "head_dim"), 1 << 20),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 1 << 26),
}
"""Sizes that no model reaches, by name in its configuration: with larger ones a worker would build it for minutes."""


def check_input_files(spec: RunSpec) -> None:
    """Refuse a run whose models, tokenizers or projections are missing.

    Raises:
        InputError: A model's configuration, tokenizer or projection file cannot be read, or there is no token to push
            with.
    """
    if spec.push_to is not None and not os.environ.get("HF_TOKEN"):
        raise InputError(f"push_to = {spec.push_to!r} needs a token of the Hub: set HF_TOKEN in the environment")
    for what, model in (("student", spec.student), *((spec.teacher_name(i), t) for i, t in enumerate(spec.teacher))):
        read_model_config(what, model.model)
        try:
            tokenizer_files(model.tokenizer_dir)
        except InputError as error:
            raise InputError(f"the {what}'s tokenizer: {error}") from error
    for teacher in spec.teacher:
        if teacher.projection is not None:
            projection_header(teacher.projection)


def read_model_config(what: str, directory: Path) -> dict[str, Any]:
    """Return the `config.json` of a model directory.

    Args:
        what: The model, as the error message names it.
        directory: A Hugging Face directory.

    Raises:
        InputError: There is none, or it holds no JSON object.
    """
    path = directory / "config.json"
    try:
        config = read_json_object(path)
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            for name, most in LARGEST.items():
                if isinstance(value := part.get(name), (int, float)) and value > most:
                    raise ValueError(f"{name} = {value:g} is more than {most}")
        return config
    except OSError as error:
        raise InputError(
            f"cannot read the {what}'s model: {path}: {error.strerror}: it takes a Hugging Face directory"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not a model configuration: {error}") from error
