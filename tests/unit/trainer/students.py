"""Small students of several families, and settings for them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.runs import resolved_run, revised
from xtoken_core.config.spec import RunSpec

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
FAMILIES = ("llama", "mixtral", "qwen3-moe")


def make_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Random weights, the same ones at every call."""
    torch.manual_seed(3)
    sizes = SIZES | changes
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    if family == "qwen3-moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def settings(student: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> RunSpec:
    """A run's settings with these changes to its student and its training."""
    return revised(resolved_run(Path("/nowhere")).spec, student=student or {}, train=train or {})


def tokens(seed: int = 0, rows: int = 2, width: int = 16) -> torch.Tensor:
    """`[rows, width]` token ids."""
    return torch.randint(0, SIZES["vocab_size"], (rows, width), generator=torch.Generator().manual_seed(seed))


def nll(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The summed cross-entropy of the next tokens."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
