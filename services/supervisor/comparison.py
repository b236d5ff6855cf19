"""Comparison of a run with its baseline, by their last evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.run.baseline import baseline_output
from services.common.run.verdict import Verdict, describe, judge
from services.supervisor.json_files import last_line

BITS = "bits_per_byte"


@dataclass(frozen=True)
class Comparison:
    """The held-out result of a run and of its baseline, both at their last evaluation.

    Attributes:
        distilled: Bits per byte of the run.
        baseline: Bits per byte of its baseline.
        distilled_step: Steps that the run had taken.
        baseline_step: Steps that the baseline had taken.
    """

    distilled: float
    baseline: float
    distilled_step: int
    baseline_step: int

    @property
    def verdict(self) -> Verdict:
        """The run's result beside its baseline's."""
        return judge(self.distilled - self.baseline)

    def line(self) -> str:
        """Return the comparison in one line."""
        steps = f" after {self.distilled_step} steps"
        if self.distilled_step != self.baseline_step:
            steps += f", the baseline after {self.baseline_step}"
        return (
            f"held-out text: {self.distilled:.4f} bits per byte distilled, {self.baseline:.4f} by cross-entropy only: "
            f"{describe(self.distilled - self.baseline)}{steps}"
        )


def compare_with_baseline(output: Path) -> Comparison | None:
    """Return the comparison of the run in `output` with its baseline; None without an evaluation of both."""
    rows = [last_line(directory / "eval.jsonl") for directory in (output, baseline_output(output))]
    results = [(float(row[BITS]), int(row["step"])) for row in rows if row and row.get(BITS) is not None]
    if len(results) < len(rows):
        return None
    (distilled, distilled_step), (baseline, baseline_step) = results
    return Comparison(distilled, baseline, distilled_step, baseline_step)


def comparison_line(output: Path) -> str:
    """Return the comparison with the baseline in one line; empty without an evaluation of both."""
    comparison = compare_with_baseline(output)
    return "" if comparison is None else comparison.line()
