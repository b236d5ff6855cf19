"""Check whether a model post-processes its logits, by a cap or a scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

PROBE_TOKENS = 8


@torch.no_grad()
def logits_are_heads(model: PreTrainedModel) -> bool:
    """Return whether a model's logits are its head applied to its last hidden states, unchanged.

    A hook on the head records its input and replaces its output by a probe of large and small values, which must come
    out of the model unchanged.

    Args:
        model: In evaluation mode.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tokens = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0) % head.weight.shape[0]
    inputs_seen: list[Tensor] = []
    probe = torch.linspace(-100.0, 100.0, PROBE_TOKENS * head.weight.shape[0], device=model.device)
    probe = probe.to(head.weight.dtype).view(1, PROBE_TOKENS, -1)

    def replace_output(_head: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        inputs_seen.append(inputs[0].clone())
        return probe

    hook = head.register_forward_hook(replace_output)
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    unchanged = torch.equal(logits.to(probe.dtype), probe)
    return unchanged and len(inputs_seen) == 1 and torch.allclose(inputs_seen[0], states, rtol=1e-2, atol=1e-3)
