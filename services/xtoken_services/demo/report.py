"""The demo's table and `report.html`, made from the metric files of its runs alone."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from xtoken_services.common.files.jsonl import replace_file
from xtoken_services.common.run.metric_lines import with_error

Line = dict[str, Any]
_COLOURS = ("#8a8f98", "#d98324", "#2a6fdb")


@dataclass(frozen=True)
class Run:
    """One trained model.

    Attributes:
        name: Its name in the table.
        steps: The lines of its `steps.jsonl`.
        evals: The lines of its `eval.jsonl`, at least one.
    """

    name: str
    steps: list[Line]
    evals: list[Line]

    @property
    def final(self) -> Line:
        """The last evaluation."""
        return self.evals[-1]


def read_run(name: str, directory: Path) -> Run:
    """Read the metrics of a complete run."""
    files = [(directory / file).read_text(encoding="utf-8") for file in ("steps.jsonl", "eval.jsonl")]
    steps, evals = ([json.loads(line) for line in text.splitlines()] for text in files)
    return Run(name, steps, evals)


COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("bits per byte", lambda run: with_error(run.final, amount=False)),
    ("accuracy", lambda run: f"{run.final['next_token_accuracy']:.1%}"),
    ("steps", lambda run: f"{run.final['step']:,}"),
    ("tokens trained", lambda run: f"{sum(line.get('tokens', 0) for line in run.steps):,}"),
    ("tokens/s", lambda run: _rate(run)),
    ("held-out tokens", lambda run: f"{run.final['tokens']:,}"),
    ("held-out documents", lambda run: f"{run.final['documents']:,}"),
    ("held-out bytes", lambda run: f"{run.final['bytes']:,}"),
)
_IN_TERMINAL = 4


def _rate(run: Run) -> str:
    seconds = sum(line.get("seconds", 0.0) for line in run.steps)
    return f"{sum(line.get('tokens', 0) for line in run.steps) / seconds:,.0f}" if seconds else "-"


def table(runs: Sequence[Run]) -> Table:
    """Return the comparison on held-out text as a table for a terminal."""
    result = Table(title="Held-out text", caption="bits per byte: lower is better, comparable across tokenizers")
    result.add_column("model", no_wrap=True)
    for title, _ in COLUMNS[:_IN_TERMINAL]:
        result.add_column(title, justify="right")
    for run in runs:
        result.add_row(run.name, *(cell(run) for _, cell in COLUMNS[:_IN_TERMINAL]))
    return result


def write_report(path: Path, teacher: Run, students: Sequence[Run]) -> None:
    """Write the report, table and curves, as one self-contained file.

    Args:
        path: Where to; replaced whole.
        teacher: Shown in the table and as a level in the students' picture.
        students: Compared with each other, step by step.
    """
    runs = [teacher, *students]
    pictures = [
        (
            "Held-out text, bits per byte",
            _picture(
                [(run.name, _points(run.evals, "bits_per_byte")) for run in students],
                level=(teacher.name, teacher.final["bits_per_byte"]),
            ),
        ),
        ("Cross-entropy of the students, nats per token", _steps_picture(students, "ce_loss")),
        ("Distillation loss", _steps_picture(students, "kl_loss")),
        ("Next-token accuracy while training", _steps_picture(students, "accuracy")),
        ("Norm of the gradient", _steps_picture(students, "grad_norm")),
        ("Tokens per second", _steps_picture(students, "tokens_per_second")),
        (
            "The teacher's own training: bits per byte",
            _picture([(teacher.name, _points(teacher.evals, "bits_per_byte"))]),
        ),
    ]
    plots = "\n".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in pictures if svg
    )
    page = Path(__file__).with_name("report.html").read_text("utf-8")
    replace_file(path, page.format(table=_html_table(runs), plots=plots))


def _html_table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in ("model", *(title for title, _ in COLUMNS)))
    body = ""
    for run in runs:
        cells = (run.name, *(cell(run) for _, cell in COLUMNS))
        body += "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in cells) + "</tr>\n"
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _points(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), (int, float))]


def _steps_picture(runs: Sequence[Run], name: str) -> str:
    return _picture([(run.name, _points(run.steps, name)) for run in runs], smooth=True)


def _picture(
    curves: Sequence[tuple[str, list[tuple[float, float]]]],
    *,
    level: tuple[str, float] | None = None,
    smooth: bool = False,
) -> str:
    """Return the curves over optimiser steps as inline SVG; empty if no curve has a finite point."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn = [(name, points) for name, points in curves if any(y for _, y in points)]
    if not drawn:
        return ""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    order = [name for name, _ in curves]
    for name, points in drawn:
        x, y = [p[0] for p in points], [p[1] for p in points]
        colour = _COLOURS[(order.index(name) + 1) % len(_COLOURS)]
        if smooth:
            axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(x, running_mean(y) if smooth else y, color=colour, label=name, marker=None if smooth else "o", ms=3)
    if level is not None:
        axes.axhline(level[1], color=_COLOURS[0], linestyle="--", label=level[0])
    axes.set_xlabel("optimiser steps")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def running_mean(values: Sequence[float], width: int = 9) -> list[float]:
    """Return the centred running mean over `width` values, fewer at the ends.

    >>> running_mean([0.0, 3.0, 6.0], width=3)
    [1.5, 3.0, 4.5]
    """
    half = width // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
