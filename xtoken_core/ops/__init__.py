"""Tensor operations of the losses and models: for each a reference that defines it, and faster backends.

`get_op` picks the backend for a device. This folder knows formulas over tensors, never what a batch, a teacher or
a run is.
"""

from xtoken_core.lazy_names import lazy_names
from xtoken_core.ops.registry import OpBackend, get_op, op_names, priority

__all__ = ["OpBackend", "get_op", "op_names", "priority"]

__getattr__ = lazy_names(__name__, {"xtoken_core.compat.embedding.reference": ["NativeEmbeddingOp"]})
