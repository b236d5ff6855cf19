"""Import path of the public names between wire and trainer layout; each is loaded at its first use."""

from xtoken_core.lazy_names import lazy_names, names_in_stub

__getattr__ = lazy_names(__name__, names_in_stub(__file__))
