"""Every attack while a real run trains: no honest request waits, nothing ends, memory is bounded, ids are exact."""

import pytest

from tests.attack.__main__ import ATTACKS, attack_for

SEED = 7


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_run_trains_on_under_every_attack() -> None:
    rows = attack_for(0.0, SEED, sorted(ATTACKS), once=True)
    assert [(row["attack"], row["faults"]) for row in rows if row["faults"]] == []
