"""Template variables of the operators' pages, from the GPU tests and the benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_tests import belongs_to
from benchmarks.whole_losses import OPS_OF
from xtoken_core.ops.registry import BACKENDS

COUNTED = {"chain": ("chain", "chain_class_order"), "gold": ("gold", "h_kl"), "p_kl": ("p_kl", "p_kl_full_vocabulary")}
"""By page, the losses of which `benchmarks.counters` reads hardware counters."""
CHANGED_BETWEEN = {("ff178141", "6da9c9bd"): ("p_kl", "p_kl_full_vocabulary")}
"""By the beginnings of two hashes of the kernels, the losses whose kernels differ between them."""
HIDDEN_TESTS = "test_losses_from_hidden_states"
PAGE_OF = {"p_kl_cross_entropy": "p_kl", "gold_cross_entropy": "gold"}
"""Ops that share another's page."""


def variables(page: str, tests: dict[str, Any], bench: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of one operator's page: its tests' outcomes and its rows of the benchmark."""
    ops = [op for op in BACKENDS if PAGE_OF.get(op, op) == page]
    losses = [name for name, used in OPS_OF.items() if used[0] == page]
    named = {
        *losses,
        *ops,
        *(f"{op}_full_vocabulary" for op in ops),
        *(f"{op}_k{k}" for op in ops for k in (16, 64, 256)),
    }
    outcomes = [
        outcome
        for name, outcome in tests["tests"].items()
        if any(belongs_to(name, op, backend) for op in ops for backend in BACKENDS[op])
    ]
    rows = [row for row in bench["rows"] if row["op"] in named]
    return {"tests": tests, "outcomes": outcomes, "bench": bench, "rows": rows, "s": bench["shape"]}


def hidden_states(tests: dict[str, Any], bench: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the page about losses from hidden states."""
    outcomes = [outcome for name, outcome in tests["tests"].items() if name.startswith(HIDDEN_TESTS)]
    return {"tests": tests, "outcomes": outcomes, "bench": bench, "s": bench["shape"]}


def counters(page: str, read: dict[str, Any], tests: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a page's hardware counters: those of its losses that have been read.

    Args:
        page: The page's name.
        read: The counters.
        tests: The outcomes of the GPU tests, which are of the kernels as they are.
    """
    losses = {name: read["losses"][name] for name in COUNTED[page] if name in read["losses"]}
    earlier = {
        name: of["kernel_hash"]
        for name, of in losses.items()
        if name in _changed_losses(of["kernel_hash"], tests["kernel_hash"])
    }
    copies = [of["copy_bytes_per_second"] / 1e12 for of in losses.values()]
    return {"r": read, "earlier": earlier, "losses": losses, "copies": copies}


def _changed_losses(before: str, now: str) -> tuple[str, ...]:
    """Return the losses whose kernels may differ between two hashes: all of them, unless it is known which."""
    every = tuple(name for names in COUNTED.values() for name in names)
    return () if before == now else CHANGED_BETWEEN.get((before[:8], now[:8]), every)
