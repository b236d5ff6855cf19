"""Tables of the chain-rule divergence for a pair of tokenizers: spellings, roots, paths and live sets.

`build` makes them and needs both tokenizers; `files` and `tables` are what a worker reads. The divergence over them is
`xtoken_core.ops.chain`, its `loss.mode` is "chain".
"""
