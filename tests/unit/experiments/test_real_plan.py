"""The plan of the experiment on real models: early ends, micro-batches, and the weights that are tried at one rate."""

from __future__ import annotations

from typing import Any

from experiments.real import results, summary
from experiments.real.methods import PATIENCE, RATES, Cell, cells
from experiments.real.page import RESULT
from tests.unit.experiments.test_real_runs import curve
from xtoken_services.trainer.best import best_evaluation


def test_other_weights_are_tried_at_the_rate_that_is_best_with_the_first() -> None:
    def row(weight: str, rate: float, bits: float) -> dict[str, Any]:
        return {**vars(Cell("de-500k", "gold", weight, rate, 0)), "curve": curve((0, 2.0, 2.0), (25, bits, bits))}

    rows = [row("even", rate, bits) for rate, bits in zip(RATES, (1.5, 1.4, 1.6), strict=True)]
    planned = results.tried(cells(("de-500k",), ("gold",), (), (0,)), rows)
    assert [(cell.weight, cell.rate) for cell in planned if cell.weight != "even"] == [
        ("light", RATES[1]),
        ("strong", RATES[1]),
    ]
    assert [cell.rate for cell in planned if cell.weight == "even"] == list(RATES)
    found = {"machine": {}, "conditions": {"de-500k": None}, "teachers": {}, "not_run": [], "runs": rows}
    begun = results.merged(found, {**found, "runs": [row("light", RATES[0], 1.2), row("strong", RATES[1], 1.3)]})
    assert [(each["weight"], each["rate"]) for each in begun["not_run"]] == [("light", RATES[1])]
    assert {(each.weight, each.rate) for each in summary.outcomes(begun)} == {("even", RATES[1]), ("strong", RATES[1])}


def test_known_runs_report_the_same_if_they_end_early() -> None:
    """Hold every curve of the result file against `eval.patience`: its best step on validation stays."""
    known = results.read_result(RESULT)["runs"]
    for run in known:
        best = min(run["curve"], key=lambda row: row["bits_per_byte"])
        for end in range(2, len(run["curve"]) + 1):
            rows = run["curve"][:end]
            found = best_evaluation(rows)
            if found is not None and found.evaluations_since >= PATIENCE:
                assert best in rows, results.cell_of(run).name
                break
