"""One rank's step, without a queue: what it does before its first backward."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.trainer.distributed import RankGroup
from services.trainer.step import Received, StepRunner
from tests.support.runs import resolved_run
from xtoken_core.losses.objective import Selection
from xtoken_core.plan import MicroBatch


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepRunner:
    """Its loss finds three chunks in every micro-batch, and the second teacher the better one."""
    worker: Any = SimpleNamespace(queue=None, run=resolved_run(tmp_path, teachers=2), beats=0)
    worker.beat = lambda: setattr(worker, "beats", worker.beats + 1)
    loss: Any = SimpleNamespace(select=lambda *_: Selection(torch.tensor(1), torch.tensor(3.0)))
    device: Any = SimpleNamespace(device=torch.device("cpu"))
    rings: Any = None
    stored: Any = None
    made = StepRunner(worker, device, loss, rings, stored, RankGroup(0, 1), rank=0, pad_id=0)
    monkeypatch.setattr(made, "_teacher_logits", lambda _: [])
    return made


RECEIVED = Received(MicroBatch((0, 1), (8, 8, 8)), {}, None, [], {})


def test_the_teachers_of_a_step_are_chosen_and_their_chunks_added_up(runner: StepRunner) -> None:
    choices = runner._choose([RECEIVED, None, RECEIVED])
    assert [int(found.chosen) for found in choices.of_batch] == [1, 0, 1]
    assert float(choices.chunks) == 6


def test_a_step_without_a_micro_batch_has_nothing_to_choose(runner: StepRunner) -> None:
    choices = runner._choose([])
    assert (choices.of_batch, float(choices.chunks)) == ([], 0)


def test_choosing_is_progress(runner: StepRunner) -> None:
    runner._choose([RECEIVED] * 3)
    assert runner.worker.beats == 3, "all of a step may take longer than one micro-batch is given"
