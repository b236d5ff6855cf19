"""Processes that start at once: forked from one that has imported what they need, and touched no device."""

import multiprocessing

PRELOADED = "forkserver"
"""How to start them, in the words of `multiprocessing`."""
CONTEXT = multiprocessing.get_context(PRELOADED)
CONTEXT.set_forkserver_preload(["tests.unit.losses.loss_cases", "tests.unit.teacher.ring_peer"])
