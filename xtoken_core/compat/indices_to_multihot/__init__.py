"""`indices_to_multihot`: a token's chosen experts, spread over all experts, and back.

Names are imported at their first use (`__init__.pyi` lists them): the Triton ones need the `triton` package, the
reference does not.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
