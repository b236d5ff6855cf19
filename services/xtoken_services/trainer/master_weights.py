"""float32 master weights behind a model that computes in bfloat16 or float16."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class MasterWeights:
    """Each trained weight in float32, with its gradient accumulated in float32.

    The model keeps rounded copies. As soon as the backward pass has a weight's gradient it is added to the master's and
    freed, so that a step's micro-batches are accumulated without rounding and no second set of gradients is held.

    Attributes:
        weights: By the model's parameter names; frozen ones have none.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Copy a model's weights as master weights and round the model's own, in place.

        Args:
            model: In float32, on its device.
            dtype: Dtype it computes in; modules that it must keep in float32 stay.
        """
        self.weights: dict[str, nn.Parameter] = {}
        self._copies: list[Tensor] = []
        self._sources: list[Tensor] = []
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        for name, parameter in model.named_parameters():
            rounds = not kept & set(name.split("."))
            if parameter.requires_grad:
                self.weights[name] = self._take(parameter, dtype) if rounds else parameter
            elif rounds:
                parameter.data = parameter.data.to(dtype)

    def copy_to_model(self) -> None:
        """Round the masters into the model, after an optimiser step or a restored checkpoint."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._sources)

    def _take(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.data)
        parameter.data = parameter.data.to(dtype)
        self._copies.append(parameter.data)
        self._sources.append(master.data)

        def accumulate(copy: Tensor) -> None:
            assert copy.grad is not None
            if master.grad is None:
                master.grad = copy.grad.float()
            else:
                master.grad.add_(copy.grad)
            copy.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
        return master
