"""The Python interface: whole runs by `distill`, and loss, aligner and collator for a training loop of one's own.

    import xtoken

    result = xtoken.distill(student="models/student", teacher="models/teacher", data="train.jsonl")

Names are imported at their first use (`__init__.pyi` lists them). Only `distill` loads the services.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
