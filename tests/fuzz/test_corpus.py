"""The kept inputs of every fuzz target, without a fuzzer."""

from __future__ import annotations

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
