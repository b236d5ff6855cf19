"""The registry of operators: their backends, by kind of device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Literal, cast

import torch

from xtoken_core.errors import ConfigError
from xtoken_core.ops.numerics import Op

DeviceKind = Literal["cuda", "rocm", "cpu"]
ENVIRONMENT = "XTOKEN_OPS"


class OpBackend(Enum):
    """Every backend, as the place of its class: `module:Class`."""

    PYTORCH_NATIVE_EMBEDDING = "xtoken_core.compat.embedding.reference:NativeEmbeddingOp"
    PYTORCH_NATIVE_INDICES_TO_MULTIHOT = "xtoken_core.compat.indices_to_multihot.reference:NativeIndicesToMultihotOp"
    PYTORCH_NATIVE_SPARSE_PROJECTION = "xtoken_core.ops.sparse_projection.reference:NativeSparseProjectionOp"
    PYTORCH_NATIVE_SELECT_TOPK_COLUMNS = "xtoken_core.ops.select_topk_columns.reference:NativeSelectTopkColumnsOp"
    PYTORCH_NATIVE_LARGEST_LOGITS = "xtoken_core.ops.largest_logits.reference:NativeLargestLogitsOp"
    PYTORCH_NATIVE_CHUNK_MEAN = "xtoken_core.ops.chunk_mean.reference:NativeChunkMeanOp"
    PYTORCH_NATIVE_CROSS_ENTROPY = "xtoken_core.ops.cross_entropy.reference:NativeCrossEntropyOp"
    PYTORCH_NATIVE_P_KL = "xtoken_core.ops.p_kl.reference:NativePKLOp"
    PYTORCH_NATIVE_P_KL_CROSS_ENTROPY = "xtoken_core.ops.p_kl.reference:NativePKLCrossEntropyOp"
    PYTORCH_NATIVE_GOLD = "xtoken_core.ops.gold.reference:NativeGoldOp"
    PYTORCH_NATIVE_GOLD_CROSS_ENTROPY = "xtoken_core.ops.gold.reference:NativeGoldCrossEntropyOp"
    PYTORCH_NATIVE_TOKEN_KL = "xtoken_core.ops.token_kl.reference:NativeTokenKLOp"
    PYTORCH_NATIVE_CHAIN = "xtoken_core.ops.chain.reference:NativeChainOp"
    PYTORCH_NATIVE_CHAIN_TOPK = "xtoken_core.ops.chain_topk.reference:NativeChainTopKOp"
    TRITON_TOKEN_KL = "xtoken_core.ops.token_kl.triton:TritonTokenKLOp"
    TRITON_CHAIN = "xtoken_core.ops.chain.triton:TritonChainOp"
    TRITON_CHAIN_TOPK = "xtoken_core.ops.chain_topk.triton:TritonChainTopKOp"
    TRITON_EMBEDDING = "xtoken_core.compat.embedding.triton:TritonEmbeddingOp"
    TRITON_INDICES_TO_MULTIHOT = "xtoken_core.compat.indices_to_multihot.triton:TritonIndicesToMultihotOp"
    TRITON_SPARSE_PROJECTION = "xtoken_core.ops.sparse_projection.triton:TritonSparseProjectionOp"
    TRITON_SELECT_TOPK_COLUMNS = "xtoken_core.ops.select_topk_columns.triton:TritonSelectTopkColumnsOp"
    TRITON_LARGEST_LOGITS = "xtoken_core.ops.largest_logits.triton:TritonLargestLogitsOp"
    TRITON_CHUNK_MEAN = "xtoken_core.ops.chunk_mean.triton:TritonChunkMeanOp"
    TRITON_CROSS_ENTROPY = "xtoken_core.ops.cross_entropy.triton:TritonCrossEntropyOp"
    TRITON_P_KL = "xtoken_core.ops.p_kl.triton:TritonPKLOp"
    TRITON_P_KL_CROSS_ENTROPY = "xtoken_core.ops.p_kl.triton:TritonPKLCrossEntropyOp"
    TRITON_GOLD = "xtoken_core.ops.gold.triton:TritonGoldOp"
    TRITON_GOLD_CROSS_ENTROPY = "xtoken_core.ops.gold.triton:TritonGoldCrossEntropyOp"


BACKENDS: Mapping[str, Mapping[str, OpBackend]] = {
    name.lower(): {"reference": native, "triton": OpBackend[f"TRITON_{name}"]}
    for native in OpBackend
    if (name := native.name.removeprefix("PYTORCH_NATIVE_")) != native.name
}
"""Every op's backends by the short name that `XTOKEN_OPS` uses."""

FOLLOWS: Mapping[str, str] = {"p_kl_cross_entropy": "p_kl", "gold_cross_entropy": "gold"}
"""An op that `XTOKEN_OPS` does not name goes with the one it contains."""

_REFERENCE_ONLY: Mapping[str, tuple[str, ...]] = dict.fromkeys(BACKENDS, ("reference",))
PRIORITY: Mapping[DeviceKind, Mapping[str, tuple[str, ...]]] = {
    "cuda": {name: tuple(sorted(backends, reverse=True)) for name, backends in BACKENDS.items()},
    "rocm": {**_REFERENCE_ONLY},
    "cpu": {**_REFERENCE_ONLY},
}
"""Per kind of device and op, the backends from first to last choice.

On CUDA the kernels come first: their tests have passed there (`benchmarks/results/gpu_tests.json`). ROCm is listed and
untested, so that only `XTOKEN_OPS` reaches them there.
"""


def op_names() -> tuple[str, ...]:
    """Return every op's name."""
    return tuple(BACKENDS)


def device_kind(device: torch.device) -> DeviceKind:
    """Return the registry's name for a device's kind: ROCm builds of torch call their devices `cuda` too."""
    if device.type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    return "cpu"


def priority(name: str, device: torch.device | str) -> tuple[OpBackend, ...]:
    """Return the op's backends for a device, best first, with `XTOKEN_OPS` applied.

    Args:
        name: One of `op_names()`.
        device: Where the op's tensors are.

    Raises:
        ConfigError: No such op, or `XTOKEN_OPS` names an op or backend that does not exist.
    """
    if name not in BACKENDS:
        raise ConfigError(f"there is no op {name!r}: there are {', '.join(op_names())}")
    overrides = _overrides(os.environ.get(ENVIRONMENT, ""))
    # An op that contains another goes with it, unless it is named itself.
    chosen = overrides.get(name) or overrides.get(FOLLOWS.get(name, ""))
    if chosen:
        return (BACKENDS[name][chosen],)
    return tuple(BACKENDS[name][short] for short in PRIORITY[device_kind(torch.device(device))][name])


def get_op(name: str, device: torch.device | str) -> Op:
    """Return the best backend of an op for tensors on `device`; one shared instance per backend.

    Raises:
        ConfigError: As `priority`; or the backend that `XTOKEN_OPS` asks for cannot be loaded here.
    """
    errors = []
    for backend in priority(name, device):
        try:
            return load_backend(backend)
        except ImportError as error:
            errors.append(f"{backend.name}: {error}")
    raise ConfigError(f"no backend of op {name!r} can be loaded: {'; '.join(errors)}")


@cache
def _overrides(text: str) -> dict[str, str]:
    chosen = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, backend = part.partition("=")
        if name not in BACKENDS or backend not in BACKENDS[name]:
            offered = ", ".join(f"{op}={short}" for op, all_ in BACKENDS.items() for short in all_)
            raise ConfigError(f"{ENVIRONMENT} holds {part!r}, which is none of {offered}")
        chosen[name] = backend
    return chosen


@cache
def load_backend(backend: OpBackend) -> Op:
    """Return the only instance of a backend.

    Raises:
        ImportError: What it stands on is not installed.
    """
    module, _, name = backend.value.partition(":")
    return cast(Op, getattr(import_module(module), name)())
