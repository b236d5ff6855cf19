"""How long a student's training step takes by loss: rows of a result file that was made at commit 6263ed3f."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.real.methods import METHODS

RESULT = Path(__file__).parent / "results" / "speed.json"


def shown(result: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the rows of a result file with their title and their step's time over cross-entropy's, by the loss's time.

    Args:
        result: Content of the result file.
    """
    rows = sorted(result["rows"], key=lambda row: row["loss_ms"])
    base = next((row["tokens_per_second"] for row in rows if row["method"] == "ce"), None)
    return [
        {**row, "title": METHODS[row["method"]].title, "ratio": base / row["tokens_per_second"] if base else None}
        for row in rows
    ]


def forward_spread(result: dict[str, Any]) -> tuple[int, float, float]:
    """Return how much the time of one computation varies: the forward pass of rows with equally many micro-batches.

    Args:
        result: Content of the result file.

    Returns:
        The number of micro-batches that most rows have, and their least and longest forward pass, in milliseconds.
    """
    most = statistics.mode(row["micro_batches"] for row in result["rows"])
    times = [row["forward_ms"] for row in result["rows"] if row["micro_batches"] == most]
    return most, min(times), max(times)
