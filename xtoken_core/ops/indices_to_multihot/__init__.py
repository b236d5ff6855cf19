"""`indices_to_multihot`: a token's chosen experts, spread over all experts, and back.

The Triton names are imported when first used; they need the `triton` package, the reference does not.
"""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from xtoken_core.ops.indices_to_multihot.reference import NativeIndicesToMultihotOp, indices_to_multihot

if TYPE_CHECKING:
    from xtoken_core.ops.indices_to_multihot.kernels import _indices_to_multihot_kernel as _indices_to_multihot_kernel
    from xtoken_core.ops.indices_to_multihot.kernels import _multihot_to_indices_kernel as _multihot_to_indices_kernel
    from xtoken_core.ops.indices_to_multihot.triton import IndicesToMultihot as IndicesToMultihot
    from xtoken_core.ops.indices_to_multihot.triton import fused_indices_to_multihot as fused_indices_to_multihot

_LAZY = {
    "IndicesToMultihot": "triton",
    "_indices_to_multihot_kernel": "kernels",
    "_multihot_to_indices_kernel": "kernels",
    "fused_indices_to_multihot": "triton",
}

__all__ = [
    "IndicesToMultihot",
    "NativeIndicesToMultihotOp",
    "fused_indices_to_multihot",
    "indices_to_multihot",
    "null_decorator",
]


def null_decorator(*args: Any, **kwargs: Any) -> Any:
    """A decorator that changes nothing, used bare or with any arguments."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return partial(lambda function: function)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
