"""LoRA adapters, implemented by peft."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from xtoken_core.config.train import LoraSpec
from xtoken_core.errors import ConfigError


def add_adapters(model: PreTrainedModel, spec: LoraSpec) -> Any:
    """Freeze a model and add LoRA adapters to its linear layers, in place.

    Args:
        model: The student.
        spec: Rank, scale and target layers.

    Returns:
        peft's view of the model, which can merge or save the adapters.

    Raises:
        ConfigError: peft is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError as error:
        raise ConfigError("train.lora needs peft: install it by pip install 'xtoken[lora]'") from error
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type,unused-ignore]  # it only divides it
        lora_dropout=spec.dropout,
        target_modules=list(spec.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        layers = {name.rpartition(".")[2]: None for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        raise ConfigError(
            f"train.lora.targets = {list(spec.targets)}: {str(error).splitlines()[0]} The student's linear layers are "
            f"{', '.join(layers)}"
        ) from error
