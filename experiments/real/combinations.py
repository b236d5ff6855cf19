"""Write the sweep over losses and their weights into `docs/losses.md`: `python -m experiments.real.combinations`.

Digits of the reduced size and one validation set of real models, both from result files of those experiments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from experiments.digits.page import RESULTS as DIGITS
from experiments.digits.summary import Summary, spread
from experiments.real.methods import METHODS, SEEDS
from experiments.real.page import RESULT
from experiments.real.summary import VALIDATION
from experiments.vocabularies.page import PAGE, insert
from xtoken_core.atomic import atomic_write

CONDITION = "de-500k"
RATES = (1e-4, 2e-4)
"""Learning rates at which every pair of weights was tried."""
TITLES = {"alm1": "ALM, tau 1", "chain": "chain", "chain_alm1": "chain and ALM, tau 1"}
ON_DIGITS = {("chain", (1.0, 1.0)): "chain_ce1"} | {(name, (1.0, 0.1)): name for name in TITLES}
"""Methods of the digits by loss and weights."""


def render(digits: Mapping[str, Any], real: Mapping[str, Any]) -> str:
    """Return the table.

    Args:
        digits: Result file of `experiments.digits`.
        real: Result file of `experiments.real`.
    """
    answers = Summary(dict(digits))
    bits: dict[tuple[str, str], float | None] = {}
    for key in [("ce", "ce"), *((name, weights) for name in TITLES for weights in METHODS[name].weights)]:
        runs = [run for run in real["runs"] if _cell(run) == (CONDITION, SEEDS[0], *key) and run["rate"] in RATES]
        values = [row[VALIDATION] for run in runs for row in run["curve"]]
        bits[key] = min(values) if {run["rate"] for run in runs} == set(RATES) else None
    lines = [
        "| loss | weight | weight of cross-entropy "
        "| digits, reduced: right answers | German: bits per byte, validation |",
        "|---|---|---|---|---|",
        _row("cross-entropy only", (0.0, 1.0), answers, "ce", bits.get(("ce", "ce"))),
    ]
    for name, title in TITLES.items():
        for weights, pair in sorted(METHODS[name].weights.items(), key=lambda item: item[1]):
            lines.append(_row(title, pair, answers, ON_DIGITS.get((name, pair)), bits.get((name, weights))))
    return "\n".join(lines)


def _cell(run: Mapping[str, Any]) -> tuple[str, int, str, str]:
    return run["condition"], run["seed"], run["method"], run["weight"]


def _row(title: str, weights: tuple[float, float], answers: Summary, method: str | None, bits: float | None) -> str:
    runs = [] if method is None else answers.runs(method)
    right = spread([run["exact_match"]["all"] for run in runs], "%") or "not run"
    cells = title, f"{weights[0]:g}", f"{weights[1]:g}", right, "not complete" if bits is None else f"{bits:.3f}"
    return f"| {' | '.join(cells)} |"


def written() -> str:
    """Return `docs/losses.md` as the result files ask for."""
    choice = json.loads((DIGITS / "choice.json").read_text(encoding="utf-8"))
    tables = render(choice, json.loads(RESULT.read_text(encoding="utf-8")))
    return insert(PAGE.read_text(encoding="utf-8"), tables, "experiments.real.combinations")


if __name__ == "__main__":
    atomic_write(PAGE, written())
