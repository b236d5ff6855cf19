"""Runs of the real pair: every variant is a run that can be started, and figures leave out the warm-up."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.real_pair import ON_ONE, TITLES, VARIANTS, WARM_UP, figures, run_file
from xtoken_core.config.spec import RunSpec


def test_every_variant_is_a_run_of_the_gpus_that_it_names(tmp_path: Path) -> None:
    names = {name: tmp_path / name for name in ("student", "teacher", "texts")}
    options = Namespace(**names, device="cuda", steps=24, samples=64, context=768)
    specs = {name: RunSpec.model_validate(run_file(options, name, tmp_path / "out")) for name in VARIANTS}
    for name, spec in specs.items():
        assert (spec.rollout is not None) == name.startswith("completions")
        assert spec.gpus_needed * spec.workers.nodes == 1 or name not in ON_ONE
    assert {*TITLES} | {*ON_ONE} == {*VARIANTS}
    assert specs["divided_fp8"].teacher[0].quantized == "fp8"
    assert specs["divided_fp8"].gpus_needed == specs["two_ranks_fsdp"].gpus_needed == 2


def test_a_rate_is_of_the_steps_behind_the_warm_up() -> None:
    rows = [{"time": 9.0 * n, "tokens": 5, "ids": [n]} for n in range(WARM_UP)]
    last = rows[-1]["time"]
    rows += [{"time": last + n, "tokens": 300, "ids": [WARM_UP - 1 + n]} for n in range(1, 4)]
    made = figures(rows, {"bits_per_byte": 0.9})
    assert made == {"tokens_per_second": pytest.approx(300.0), "bits_per_byte": 0.9, "ids_exact": True}
    rows[2]["ids"] = [0]
    assert not figures(rows, {"bits_per_byte": 0.9})["ids_exact"]
