"""Tables of the chain-rule divergence for a pair of tokenizers: spellings, roots, paths and live sets.

The divergence over them is `xtoken_core.ops.chain`, its `loss.mode` is "chain".
"""

from xtoken_core.chain.build import build_tables
from xtoken_core.chain.files import cached_tables
from xtoken_core.chain.tables import ChainTables

__all__ = ["ChainTables", "build_tables", "cached_tables"]
