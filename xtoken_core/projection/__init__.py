"""The projection from the student's vocabulary to a teacher's: build, store, read, cache and report.

Importing this package imports no torch: names are imported at their first use (`__init__.pyi` lists them).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
