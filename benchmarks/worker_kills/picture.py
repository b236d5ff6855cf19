"""Draw the losses of the whole run that is killed beside two that are not, `docs/img/resume.svg`.

python -m benchmarks.worker_kills.picture
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.worker_kills.whole_run import RUNS

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "resume.json"
PICTURE = ROOT / "docs" / "img" / "resume.svg"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the losses, and below them the differences from the first run by step, for light and dark pages."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    ink = "#808080"
    style = {"svg.hashsalt": "resume", "text.color": ink, "axes.edgecolor": ink, "axes.labelcolor": ink,
             "xtick.color": ink, "ytick.color": ink, "font.size": 9}  # fmt: skip
    with pyplot.rc_context(style):
        figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7.2, 4.6), height_ratios=(3, 2))
        losses = result["losses"]
        looks = dict(zip(RUNS, (("#1f77b4", "-", 3.0), ("#2ca02c", "--", 2.0), ("#d62728", ":", 2.0)), strict=True))
        for name, (colour, line, width) in looks.items():
            above.plot(losses[name], line, color=colour, linewidth=width, label=name)
        for name in RUNS[1:]:
            apart = [abs(a - b) for a, b in zip(losses[name], losses[RUNS[0]], strict=True)]
            below.plot(apart, looks[name][1], color=looks[name][0], label=f"{name}, from {RUNS[0]}")
        for number, kill in enumerate(result["kills"]):
            above.axvline(kill["step"] + 0.5, color=ink, linewidth=0.5, label="" if number else "a kill")
        above.set_ylabel("loss")
        below.set(xlabel="step", ylabel="difference")
        below.set_yscale("symlog", linthresh=1e-6)
        below.set_ylim(bottom=0.0)
        for axes in (above, below):
            axes.legend(frameon=False, fontsize=8)
        figure.tight_layout()
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(RESULT.read_text(encoding="utf-8")), PICTURE)
