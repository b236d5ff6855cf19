"""Template variables of the operators' pages, from the GPU tests and the benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_tests import belongs_to
from benchmarks.whole_losses import OPS_OF
from xtoken_core.ops.registry import BACKENDS

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
