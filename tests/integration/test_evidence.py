"""The experiments again, small: the committed tables say what comes out.

On a GPU and with `XTOKEN_REAL_STATE`, a directory with `models` and `texts` of `python -m experiments.real`, runs of
real models are repeated; the digits of the reduced size need neither.
"""

from __future__ import annotations

import json
import os
import time
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from experiments.digits import page, stages
from experiments.digits.compare import RESOLUTIONS, mismatches
from experiments.digits.methods import CROSS
from experiments.digits.settings import REDUCED
from experiments.digits.summary import Summary
from experiments.real import stages as real
from experiments.real import summary
from experiments.real.methods import Cell
from experiments.real.page import RESULT

BASELINE = "ce"
METHODS = ("chain", "alm1", "p_kl")
"""Losses whose sign and order are held, fixed before they were repeated."""
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_first_losses_on_digits_come_out_as_the_table_says(tmp_path: Path) -> None:
    side_by_side = os.cpu_count() or 1
    known = Summary(json.loads((page.RESULTS / "reduced.json").read_text(encoding="utf-8")))
    held = [name for name in METHODS if len(known.runs(name)) == REDUCED.seeds]
    assert "p_kl" in held
    first = tuple(f"student-{seed}" for seed in range(REDUCED.seeds))
    stages.scratch(tmp_path, REDUCED, side_by_side=side_by_side, only=(CROSS, *first))
    until = time.monotonic() + 3000
    runs = max(1, side_by_side // 2)
    assert stages.runs(tmp_path, REDUCED, side_by_side=runs, until=until, only=(BASELINE, *held), seeds=())
    stages.measure(tmp_path, REDUCED, tmp_path)
    again = Summary(json.loads((tmp_path / "reduced.json").read_text(encoding="utf-8")))
    found = {}
    for pair in combinations((*held, BASELINE), 2):
        for measure, resolution in RESOLUTIONS.items():
            differences = [one.difference(*pair, measure) for one in (known, again)]
            assert [len(values) for values in differences] == [REDUCED.seeds] * 2
            if lines := mismatches(*differences, resolution=resolution):
                found[pair, measure] = lines
    assert found == {}
