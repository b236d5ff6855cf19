"""Import path of the public names that open a teacher's logits; the code is in `xtoken_core.transports`."""

from xtoken_core.lazy_names import lazy_names, names_in_stub

__getattr__ = lazy_names(__name__, names_in_stub(__file__))
