"""Compatibility surface: the calls and packers of data planes that others know, over the generic task queue.

The pipeline of a run uses none of this: it works with `xtoken_core.wire.Column`s and `RunClient`.
"""
