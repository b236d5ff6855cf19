"""Import path of the public names that open a teacher's logits; the code is in `xtoken_core.transports`."""

from xtoken_core.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
