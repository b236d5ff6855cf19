"""Code that a run does not use: what other systems know by name, over the library's own parts.

`task_client` has the clients of the generic task queue; `samples` and `meta` the calls and packers of a data plane;
`tensors` and `layout` turn TensorDicts into columns, and columns into what a trainer reads; `embedding` and
`indices_to_multihot` two operators that no loss calls. The documented import paths, such as
`xtoken_core.data_plane.codec`, load them from here at their first use, as `xtoken_core.ops.registry` does the two
operators. Nothing else of the product imports this package.
"""
