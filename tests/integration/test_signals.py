"""Whole runs of real processes, once per way in which a teacher's signal can travel: all must train alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.control.record import RunState
from tests.integration.conftest import Crew
from tests.support.tiny_run import TinyAssets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec

Start = Callable[[RunSpec], Crew]


def losses_of(assets: TinyAssets, directory: Path, start: Start, **changes: Any) -> torch.Tensor:
    """The losses of a tiny run that ended well, having trained each of its 48 positions once."""
    spec = tiny_spec(assets, directory, records=48, **changes)
    ending = start(spec).join()
    assert ending.state == RunState.COMPLETED, ending.error
    steps = steps_of(spec.output)
    assert [i for line in steps for i in line["ids"]] == list(range(48))
    return torch.tensor([line["loss"] for line in steps])


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What the run over shared memory gave, once it was made."""
    return {}


@pytest.mark.parametrize("signal", ["shared_memory_hidden", "queue"])
def test_hidden_states_train_as_logits_do(
    assets: TinyAssets, tmp_path: Path, start: Start, expected: dict[str, torch.Tensor], signal: str
) -> None:
    if not expected:
        expected["loss"] = losses_of(assets, tmp_path / "logits", start, workers={"signal": "shared_memory"})
    found = losses_of(assets, tmp_path / "hidden", start, workers={"signal": signal})
    torch.testing.assert_close(found, expected["loss"], rtol=1e-5, atol=1e-6)


def test_a_killed_teacher_is_replaced_where_the_signal_goes_through_the_queue(
    assets: TinyAssets, tmp_path: Path, start: Start
) -> None:
    spec = tiny_spec(assets, tmp_path, records=160, workers={"signal": "queue"})
    crew = start(spec)
    crew.wait_for_steps(3)
    crew.kill("teacher-0-0")
    ending = crew.join()
    assert ending.state == RunState.COMPLETED, ending.error
    assert [i for line in steps_of(spec.output) for i in line["ids"]] == list(range(160))
