"""Families of models that can be run on packed rows, by their `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FAMILIES = frozenset(
    {
        "gemma",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""Model types whose layers see other tokens only through attention by `position_ids` and the attention interface."""
FIXED_ROPE = (None, "default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embedding that depend on a token's position, and not on the length of the row."""


def why_not_packed(config: Mapping[str, Any], context_length: int) -> str | None:
    """Return why a model cannot be run on packed rows; None if it can.

    Args:
        config: Its `config.json`.
        context_length: Maximum of tokens per sample.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        return f'the model type "{kind}" is not known to keep packed samples apart'
    if config.get("attn_logit_softcapping") is not None:
        return "it caps its attention's logits (attn_logit_softcapping)"
    if config.get("use_bidirectional_attention"):
        return "its attention is not causal (use_bidirectional_attention)"
    for rope in _ropes(config):
        rope_type = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        if rope_type not in FIXED_ROPE and not (isinstance(original, int) and context_length <= original):
            return f'its rotary embedding "{rope_type}" depends on the length of the row'
    return None


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every setting of a rotary embedding; a model may have one per kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            yield rope
            yield from (inner for inner in rope.values() if isinstance(inner, Mapping))
