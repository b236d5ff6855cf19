"""Comparison of a run with its baseline, by the evaluations of the weights that both export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xtoken_services.common.run.baseline import baseline_output
from xtoken_services.common.run.metric_lines import BITS
from xtoken_services.common.run.status import exported_evaluation
from xtoken_services.common.run.verdict import Difference, Verdict, difference
from xtoken_services.supervisor.json_files import read_json
from xtoken_services.supervisor.run_files import Curve
from xtoken_services.supervisor.run_record import SPEC, SUMMARY


@dataclass(frozen=True)
class Comparison:
    """The held-out result of a run and of its baseline: of their last evaluations, or with `eval.keep_best` the best.

    Attributes:
        distilled: Bits per byte of the run.
        baseline: Bits per byte of its baseline.
        distilled_step: Steps that the run had taken.
        baseline_step: Steps that the baseline had taken.
        difference_error: Standard error of the difference over the documents of both; None if there are not two.
    """

    distilled: float
    baseline: float
    distilled_step: int
    baseline_step: int
    difference_error: float | None

    @property
    def difference(self) -> Difference:
        """The run's result less its baseline's."""
        return Difference(self.distilled - self.baseline, self.difference_error)

    @property
    def verdict(self) -> Verdict:
        """The run's result beside its baseline's."""
        return self.difference.verdict

    def document(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {**asdict(self), "verdict": self.verdict}

    def line(self) -> str:
        """Return the comparison in one line."""
        steps = f" after {self.distilled_step} steps"
        if self.distilled_step != self.baseline_step:
            steps += f", the baseline after {self.baseline_step}"
        return (
            f"held-out text: {self.distilled:.4f} bits per byte distilled, {self.baseline:.4f} by cross-entropy only: "
            f"{self.difference}{steps}"
        )


def compare_with_baseline(output: Path) -> Comparison | None:
    """Return the comparison of the run in `output` with its baseline; None without an evaluation of both."""
    return compare(exported_in(output), exported_in(baseline_output(output)))


def compare(distilled: Mapping[str, Any], baseline: Mapping[str, Any]) -> Comparison | None:
    """Return the comparison of the evaluations of two runs' exported weights; None if one has none."""
    change = difference(distilled, baseline)
    if change is None:
        return None
    return Comparison(distilled[BITS], baseline[BITS], distilled["step"], baseline["step"], change.error)


def exported_in(output: Path) -> dict[str, Any]:
    """Return the evaluation of the weights that the run in a directory exports; empty without one."""
    curve = Curve(output / "eval.jsonl")
    curve.refresh()
    spec = read_json(output / SPEC)
    return exported_evaluation(spec, read_json(output / SUMMARY), curve.last, curve.best(spec))
