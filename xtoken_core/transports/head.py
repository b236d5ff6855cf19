"""A teacher's head alone, read from its safetensors: what a student needs whose teacher sends hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xtoken_core.errors import InputError

HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""How the names of heads end in the architectures that have one of their own."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""How the names of input embeddings end, which are the head where the two are tied."""


def load_head(directory: Path, *, width: int, hidden: int, dtype: torch.dtype) -> Float[Tensor, "V_m H"]:
    """The head's weight from a Hugging Face directory; no other tensor is read.

    Args:
        directory: Holds `.safetensors` files.
        width: Rows the head must have, V_m.
        hidden: Columns it must have, H.
        dtype: What it is wanted in.

    Raises:
        InputError: If there is no such tensor, or it has another shape.
    """
    places: dict[str, Path] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                places.update(dict.fromkeys(file.keys(), path))
        name = _chosen(places)
        if name is None:
            raise InputError(f"{directory} holds no head: none of its tensors ends in {', '.join(HEADS + EMBEDDINGS)}")
        with safe_open(places[name], framework="pt") as file:
            head: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read the head from {directory}: {error}") from error
    if tuple(head.shape) != (width, hidden):
        raise InputError(f"{directory}: {name} has shape {list(head.shape)}, not [{width}, {hidden}]")
    return head.to(dtype)


def _chosen(names: Iterable[str]) -> str | None:
    """The head of its own, or else the input embedding that it is tied to."""
    known = sorted(names, key=lambda name: (name.count("."), name))
    for endings in (HEADS, EMBEDDINGS):
        for ending in endings:
            for name in known:
                if name == ending or name.endswith("." + ending):
                    return name
    return None
