"""Runs of real models again: the committed tables say what comes out.

They need a GPU and `XTOKEN_REAL_STATE`, a directory with `models` and `texts` of `python -m experiments.real`.
"""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from experiments.real import stages as real
from experiments.real import summary
from experiments.real.methods import Cell
from experiments.real.page import RESULT

STATE = os.environ.get("XTOKEN_REAL_STATE", "")
CELLS = (("chain_fading", "even", 4e-4), ("chain", "even", 4e-4), ("p_kl", "even", 4e-4), ("ce", "ce", 2e-4))
"""Runs on half a megabyte of German at their best learning rates, in the order of their outcome; the default first."""
NOISE = 0.01
"""Bits per byte: three standard deviations of a method over data seeds."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (STATE and torch.cuda.is_available()), reason="needs a GPU and XTOKEN_REAL_STATE")
def test_the_first_losses_on_real_models_come_out_as_the_table_says(tmp_path: Path) -> None:
    for name in ("models", "texts"):
        (tmp_path / name).mkdir()
        for path in (Path(STATE) / name).iterdir():
            (tmp_path / name / path.name).symlink_to(path.resolve())
    planned = [Cell("de-500k", method, weight, rate, 0) for method, weight, rate in CELLS]
    until = time.monotonic() + 1000
    assert real.runs(tmp_path, planned, side_by_side=len(planned), until=until, device="cuda", steps=None)
    again = real.collect(tmp_path, planned, tmp_path / "real.json")
    known = json.loads(RESULT.read_text(encoding="utf-8"))
    known["runs"] = [run for run in known["runs"] if any(vars(cell).items() <= run.items() for cell in planned)]
    own = "handbook-de.test"
    published, repeated = (
        {outcome.method: outcome.bits[own] for outcome in summary.outcomes(one | {"not_run": []})}
        for one in (known, again)
    )
    assert sorted(published, key=published.__getitem__) == [method for method, _, _ in CELLS]
    for first, second in pairwise(CELLS):
        now, then = (bits[second[0]] - bits[first[0]] for bits in (repeated, published))
        assert abs(now - then) < NOISE, (first, second)
        assert now > 0 or then < NOISE, (first, second)
