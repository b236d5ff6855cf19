"""Import path of the public names of `xtoken_core.compat.indices_to_multihot`; each is loaded at its first use."""

from xtoken_core.lazy_names import lazy_names

_NAMES = (
    "IndicesToMultihot",
    "NativeIndicesToMultihotOp",
    "_indices_to_multihot_kernel",
    "_multihot_to_indices_kernel",
    "fused_indices_to_multihot",
    "indices_to_multihot",
    "null_decorator",
)
__getattr__ = lazy_names(__name__, {"xtoken_core.compat.indices_to_multihot": _NAMES})
