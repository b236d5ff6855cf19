"""Variables of the page about on-policy distillation beside TRL's trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.bounds import Bound, at_least

MUST_BEST, MUST_EQUAL = 2.0, 1.2


def variables(result: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables.

    Args:
        result: The result file; empty without one.
    """
    sides = {name: result.get(name) or [] for name in ("ours", "trl")}
    if not all(sides.values()):
        return {"r": None}
    best = {name: max(rows, key=_rate) for name, rows in sides.items()}
    of_size = {name: {row["batch"]: row for row in rows} for name, rows in sides.items()}
    both = sorted(of_size["ours"].keys() & of_size["trl"].keys())
    ratios = [(size, _rate(of_size["ours"][size]) / _rate(of_size["trl"][size])) for size in both]
    return {
        "r": result,
        "rows": [
            (_name(side, row), row)
            for side, rows in (("ours", sides["ours"]), ("trl", sides["trl"]))
            for row in sorted(rows, key=_size)
        ],
        "best": best,
        "best_ratio": _rate(best["ours"]) / _rate(best["trl"]),
        "ratios": ratios,
        "ended": [row for row in sides["trl"] if "ended" in row],
        "must": (MUST_BEST, MUST_EQUAL),
    }


def bounds(result: dict[str, Any]) -> list[Bound]:
    """Return the bounds of the rates.

    Args:
        result: As for `variables`.
    """
    made = variables(result)
    run = made["r"] is not None
    equal = [ratio for _, ratio in made["ratios"]] if run else []
    return [
        at_least(
            "each side at its best batch, tokens/s relative to TRL", made["best_ratio"] if run else None, MUST_BEST
        ),
        at_least("at equal batches, tokens/s relative to TRL, least", min(equal) if equal else None, MUST_EQUAL),
    ]


def _name(side: str, row: dict[str, Any]) -> str:
    if side == "ours":
        return "this package"
    return "TRL" if row.get("warm_up", 2) > 1 else "TRL, its second step alone"


def _rate(row: dict[str, Any]) -> float:
    return float(row["tokens_per_second"])


def _size(row: dict[str, Any]) -> int:
    return int(row["batch"])
