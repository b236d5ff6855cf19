"""The distillation losses: which positions and chunks count, what is compared, and how parts and teachers are weighted.

One file and one class per loss over `common` and `masks`; `distillation` holds the one public loss. Formulas over
tensors are those of `xtoken_core.ops`. Names are imported at their first use (`__init__.pyi` lists them), so that a
light module of this folder can be imported by itself.
"""

from xtoken_core.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
