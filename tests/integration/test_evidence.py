"""The reduced experiment again, from its text to its figures: does the committed table say what comes out?"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from experiments.digits import page, stages
from experiments.digits.compare import RESOLUTIONS, mismatches
from experiments.digits.methods import CROSS
from experiments.digits.settings import REDUCED
from experiments.digits.summary import Summary

METHOD, BESIDE = "p_kl", "ce"
"""P-KL with the reference's average, `log_prob`, fixed before anything was measured."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_p_kl_and_cross_entropy_only_come_out_as_the_table_says(tmp_path: Path) -> None:
    side_by_side = os.cpu_count() or 1
    first = tuple(f"student-{seed}" for seed in range(REDUCED.seeds))
    stages.scratch(tmp_path, REDUCED, side_by_side=side_by_side, only=(CROSS, *first))
    until = time.monotonic() + 3000
    runs = max(1, side_by_side // 2)
    assert stages.runs(tmp_path, REDUCED, side_by_side=runs, until=until, only=(BESIDE, METHOD), seeds=())
    stages.measure(tmp_path, REDUCED, tmp_path)
    known, again = (
        Summary(json.loads((place / "reduced.json").read_text(encoding="utf-8"))) for place in (page.RESULTS, tmp_path)
    )
    found = {}
    for measure, resolution in RESOLUTIONS.items():
        differences = [summary.difference(METHOD, BESIDE, measure) for summary in (known, again)]
        assert [len(values) for values in differences] == [REDUCED.seeds] * 2
        found[measure] = mismatches(*differences, resolution=resolution)
    assert found == {measure: [] for measure in RESOLUTIONS}
