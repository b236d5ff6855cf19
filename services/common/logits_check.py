"""What stands behind a model's head: nothing, or a cap or a scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

PROBE_TOKENS = 8


@torch.no_grad()
def logits_are_heads(model: PreTrainedModel) -> bool:
    """Whether a model's logits are what its head makes of its last hidden states, and nothing is done to them after.

    It is tried: the head is watched, and answers something of its own, large and small, that must come out unchanged.

    Args:
        model: In evaluation mode.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tokens = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0) % head.weight.shape[0]
    seen: list[Tensor] = []
    answer = torch.linspace(-100.0, 100.0, PROBE_TOKENS * head.weight.shape[0], device=model.device)
    answer = answer.to(head.weight.dtype).view(1, PROBE_TOKENS, -1)

    def watch(_head: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        seen.append(inputs[0].clone())
        return answer

    hook = head.register_forward_hook(watch)
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    untouched = torch.equal(logits.to(answer.dtype), answer)
    return untouched and len(seen) == 1 and torch.allclose(seen[0], states, rtol=1e-2, atol=1e-3)
