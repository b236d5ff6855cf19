"""Per-step metrics: throughput, MFU, peak memory."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xtoken_core.config import LossConfig
from xtoken_services.trainer.student import Student

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Peak dense bfloat16 TFLOP/s from the data sheets, by a part of the device's name."""


def to_floats(parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Return the metrics of micro-batches as numbers, with a single device synchronisation."""
    values = [value.double() for part in parts for value in part.values()]
    numbers = iter(torch.stack(values).tolist() if values else [])
    return [{name: next(numbers) for name in part} for part in parts]


def kl_fraction(row: Mapping[str, float], loss: LossConfig) -> dict[str, float]:
    """Return the weighted divergence's fraction of a step's loss as a metric; none without a teacher.

    >>> kl_fraction({"loss": 1.25, "kl_loss": 1.0, "ce_loss": 2.5}, LossConfig(ce_loss_scale=0.1))
    {'kl_fraction': 0.8}
    """
    total = row.get("loss", 0.0)
    if "kl_loss" not in row or not math.isfinite(total) or total <= 0:
        return {}
    weight = 1.0 if loss.dynamic_loss_scaling else loss.ce_loss_scale
    return {"kl_fraction": round(1.0 - weight * row["ce_loss"] / total, 6)}


def flops_per_token(student: Student) -> float:
    """Return the FLOPs of one trained token: `6 N`, or `4 N` where only adapters are trained.

    `2 N` for the forward pass, `2 N` for the gradients of activations, `2 N` for those of weights (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1). `N` counts every weight that a token is multiplied with: of a mixture's experts the
    active ones, and no embedding table unless it is the head too. Attention scores are left out, and so is what
    activation checkpointing computes again.
    """
    model = student.model
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None)
    active_fraction = active / experts if experts and active else 1.0
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is not embedding or tied:
            routed = ".experts." in name and "shared" not in name
            total += parameter.numel() * (active_fraction if routed else 1.0)
    return (4.0 if student.adapted else 6.0) * total


def peak_flops(device: torch.device) -> float | None:
    """Return a device's peak FLOP/s from the table; None if it is not in it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak * 1e12 for part, peak in PEAK_TFLOPS.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Return peak memory in bytes: of tensors since the last call on a GPU, of the process since its start on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
