"""Clients of the transfer queue, and the layout of its columns in a trainer.

Importing this package imports no torch; the names that need it are loaded when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
