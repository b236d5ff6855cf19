"""Tables of the chain-rule divergence for a pair of tokenizers: spellings, roots, paths and live sets.

The divergence (`xtoken_core.losses.chain`) is a library function and an experiment (`experiments/consistency`). It is
not yet a `loss.mode`: no registry lists it and no run uses it.
"""

from xtoken_core.chain.build import build_tables
from xtoken_core.chain.files import cached_tables
from xtoken_core.chain.tables import ChainTables

__all__ = ["ChainTables", "build_tables", "cached_tables"]
