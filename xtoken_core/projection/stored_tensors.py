"""Deterministic safetensors bytes: the same tensors and metadata give the same file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the safetensors layout, assembled here: the library orders its metadata differently from run to run.

    Args:
        tensors: By name, on the CPU, in one of `DTYPES`; written by element size, then in this order.
        metadata: Further strings by name.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    data, at = [], 0
    # Widest elements first: a tensor whose bytes begin at no multiple of its element size cannot be mapped.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        flat = tensor.new_empty(tensor.numel()).copy_(tensor.reshape(-1))  # stride 1, also of empty tensors
        raw = flat.view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)
