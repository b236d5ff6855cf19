"""Models divided over several GPUs, by the tensor-parallel plans that transformers has for their families.

Every layer's projections are divided among the GPUs by heads and by columns, and the partial outputs are summed twice
per layer. Embedding, norms and head stay whole on every GPU: the process that owns a ring writes logits, or shares its
head, without another collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtoken_core.errors import ConfigError

FAMILIES = frozenset(
    {
        "gemma",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""Model types whose results under their plan equal those of one GPU in the tests."""
QUANTIZED = FAMILIES - {"mixtral", "olmo2", "qwen3_moe"}
"""Those whose projections are all divided by rows or by columns, as `teacher.quantized` multiplies them."""
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Settings of a configuration that the number of GPUs must divide."""


def why_not_divided(config: Mapping[str, Any], gpus: int) -> str | None:
    """Return why a model cannot be divided over several GPUs; None if it can.

    Args:
        config: Its `config.json`.
        gpus: Number of GPUs.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        return f'the model type "{kind}" has no known tensor-parallel plan'
    for name in DIVIDED:
        count = config.get(name)
        if isinstance(count, int) and count % gpus:
            return f"its {name} = {count} cannot be divided by {gpus}"
    return None


def check_divided(
    what: str, directory: Path, config: Mapping[str, Any], gpus: int, *, quantized: str | None = None
) -> None:
    """Refuse a model that cannot be divided over several GPUs.

    Args:
        what: Name of the model for the error, such as `teacher`.
        directory: The model's directory.
        config: Its `config.json`.
        gpus: Number of GPUs.
        quantized: Format of its linear layers, such as `fp8`; None: its dtype.

    Raises:
        ConfigError: It cannot; the text has the reason.
    """
    reason = why_not_divided(config, gpus) if gpus > 1 else None
    if gpus > 1 and reason is None and quantized and config["model_type"] not in QUANTIZED:
        reason = f'the model type "{config["model_type"]}" is not divided with quantized layers ({quantized})'
    if reason is not None:
        raise ConfigError(
            f"the {what} ({directory}) cannot be divided over {gpus} GPUs: {reason}: lower teacher.gpus or take "
            "another model"
        )
