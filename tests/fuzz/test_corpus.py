"""The kept inputs of every fuzz target, without a fuzzer."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import corpus
from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_kept_inputs_break_nothing(target: str) -> None:
    inputs = [*SEEDS[target](), *corpus.load(target)]
    assert inputs
    for data in inputs:
        TARGETS[target](data)


REPAIRED = Path(__file__).parent / "repaired"
"""Inputs that once broke a target, one file each, named after the target."""


@pytest.mark.parametrize("path", sorted(REPAIRED.iterdir()), ids=lambda path: path.name)
def test_repaired_inputs_break_nothing(path: Path) -> None:
    TARGETS[path.name.partition(".")[0]](path.read_bytes())


@pytest.mark.slow
def test_a_process_leaves_no_scratch_behind() -> None:
    fuzz = "from tests.fuzz.targets import SCRATCH, TARGETS; TARGETS['index'](b'{}'); print(SCRATCH)"
    root = Path(__file__).parents[2]
    made = subprocess.run([sys.executable, "-c", fuzz], cwd=root, capture_output=True, text=True, check=True).stdout
    assert Path(made.strip()).name.startswith("xf-") and not Path(made.strip()).exists()
