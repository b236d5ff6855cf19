"""Loading of a teacher's head alone from its safetensors, for a trainer whose teacher sends hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xtoken_core.errors import InputError
from xtoken_core.model_files import weight_files
from xtoken_core.regular_files import descriptor_path

HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Suffixes of the names of untied heads."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""Suffixes of the names of input embeddings, which are the head if the two are tied."""


def load_head(directory: Path, *, width: int, hidden: int, dtype: torch.dtype) -> Float[Tensor, "V_m H"]:
    """Load the head's weight from a Hugging Face directory; no other tensor is read.

    Args:
        directory: Holds `.safetensors` files.
        width: Rows the head must have, V_m.
        hidden: Columns it must have, H.
        dtype: What it is wanted in.

    Raises:
        InputError: If there is no such tensor, or it has another shape.
    """
    file_of: dict[str, Path] = {}
    try:
        for path in weight_files(directory):
            with descriptor_path(path) as opened, safe_open(opened, framework="pt") as file:
                file_of.update(dict.fromkeys(file.keys(), path))
        name = _head_name(file_of)
        if name is None:
            raise InputError(f"{directory} holds no head: none of its tensors ends in {', '.join(HEADS + EMBEDDINGS)}")
        with descriptor_path(file_of[name]) as opened, safe_open(opened, framework="pt") as file:
            head: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read the head from {directory}: {error}") from error
    if tuple(head.shape) != (width, hidden):
        raise InputError(f"{directory}: {name} has shape {list(head.shape)}, not [{width}, {hidden}]")
    return head.to(dtype)


def _head_name(names: Iterable[str]) -> str | None:
    """Return the name of the untied head, or else of the input embedding."""
    known = sorted(names, key=lambda name: (name.count("."), name))
    endings = [f".{ending}" for ending in (*HEADS, *EMBEDDINGS)]
    return next((name for ending in endings for name in known if f".{name}".endswith(ending)), None)
