"""Import path of the public names of `xtoken_core.compat.indices_to_multihot`; each is loaded at its first use."""

from xtoken_core.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
