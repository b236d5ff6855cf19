"""Variables of the page about ideas for kernels."""

from __future__ import annotations

from typing import Any

WORTH = 0.95
"""A variant that takes a larger fraction of the time is dropped."""


def fastest_of(kernel: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fastest variant, its time relative to the one by pointers, which does the same work, and the verdict.

    A variant is also set beside the kernel that ships: `of_shipped`. Where that computes the same and no more, a
    variant must be faster than it, too.
    """
    timed = {row["variant"]: row["ms"] for row in kernel["rows"] if "ms" in row}
    plain = timed.pop("pointers", None)
    if plain is None or not timed:
        return None
    best = min(timed, key=lambda name: timed[name])
    relative, of_shipped = timed[best] / plain, timed[best] / min(kernel["shipped_ms"].values())
    faster = relative < WORTH and (bool(kernel["also"]) or of_shipped < WORTH)
    return {"variant": best, "relative": relative, "of_shipped": of_shipped, "faster": faster, "also": kernel["also"]}


def variables(timed: dict[str, Any] | None, real: dict[str, Any] | None) -> dict[str, Any]:
    """Return the template's variables.

    Args:
        timed: The result of `benchmarks.kernel_ideas`, if there is one.
        real: The result of `benchmarks.kernel_ideas.real_logits`, likewise.
    """
    kernels = timed["kernels"] if timed else {}
    shipped = [list(kernel["shipped_ms"].items()) for kernel in kernels.values()]
    ships = []
    for i in range(max(map(len, shipped), default=0)):
        names = {each[i][0] for each in shipped if i < len(each)}
        ships.append(
            {"name": "; ".join(sorted(names)), "ms": [each[i][1] if i < len(each) else None for each in shipped]}
        )
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for kernel in kernels.values():
        for row in kernel["rows"]:
            by_variant.setdefault(row["variant"], []).append(row)
    errors = {}
    if real:
        errors[f"{real['teacher']} to {real['student']}"] = real["rows"]
    drawn = timed.get("eight_bits", {}).get("errors", {}) if timed else {}
    errors |= {f"drawn, standard deviation {spread}": rows for spread, rows in drawn.items()}
    return {
        "r": timed,
        "ships": ships,
        "variants": [{"name": name, "cells": rows} for name, rows in by_variant.items()],
        "fastest": {name: fastest_of(kernel) for name, kernel in kernels.items()},
        "failed": [
            (name, row["variant"], row["error"])
            for name, kernel in kernels.items()
            for row in kernel["rows"]
            if "error" in row
        ],
        "errors": errors,
    }
