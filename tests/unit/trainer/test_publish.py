"""Publishing weights for rollout workers: when, under which tag, and in which runs not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.generation.published_weights import Version, read_version, weights_file
from xtoken_services.trainer.publish import WeightsPublisher


def run_of(directory: Path, **parts: Any) -> ResolvedRun:
    """A run of four steps."""
    made = resolved_run(directory)
    raw = made.spec.model_dump() | {"loss": {"mode": "alm"}} | parts
    return made.model_copy(update={"spec": RunSpec.model_validate(raw)})


def publisher(run: ResolvedRun, told: list[tuple[int, int, int]], *, writes: bool = True) -> WeightsPublisher:
    """A publisher that notes step, tag and rewinds of what it tells the queue."""
    queue = SimpleNamespace(publish=lambda step, *, tag, rewinds: told.append((step, tag, rewinds)))
    worker: Any = SimpleNamespace(run=run, queue=queue)
    weights = dict(torch.nn.Linear(2, 2).named_parameters())
    student: Any = SimpleNamespace(sharded=False, full_weights=lambda keeps: weights)
    return WeightsPublisher(worker, student, writes=writes)


def test_weights_are_published_after_a_rewind_and_when_they_are_due(tmp_path: Path) -> None:
    rollout = {"max_new_tokens": 8, "publish_every": 2, "weights": "directory"}
    run = run_of(tmp_path, rollout=rollout)
    run.spec.output.mkdir()
    told: list[tuple[int, int, int]] = []
    published = publisher(run, told)
    published.after_rewind(0, 1)
    first = read_version(weights_file(run))
    assert (first.step, told) == (0, [(0, first.tag, 1)])
    for step in (1, 2, 3, 4):
        published.after_step(step, 1)
    assert told[1:] == [(2, first.tag, 1)], "not after the last step either"
    assert read_version(weights_file(run)) == Version(2, first.tag)
    published.after_rewind(1, 2)
    assert told[2][0::2] == (1, 2) and told[2][1] != first.tag
    published.close()
    assert not weights_file(run).exists()


def test_a_cold_start_publishes_no_sooner_than_a_completion_may_need(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = {"max_new_tokens": 8, "after": 3, "weights": "directory"}
    run = run_of(tmp_path, rollout=rollout)
    run.spec.output.mkdir()
    told: list[tuple[int, int, int]] = []
    published = publisher(run, told)
    published.after_rewind(0, 1)
    published.after_step(1, 1)
    published.after_rewind(1, 2)
    assert not told and not weights_file(run).exists() and not caplog.text
    published.after_step(2, 2)
    published.after_step(3, 2)
    assert [step for step, _, _ in told] == [2, 3], "step 3 may train completions by weights of step 2"
    assert read_version(weights_file(run)) == Version(3, told[0][1])
    published.after_rewind(3, 3)
    assert told[2][::2] == (3, 3) and "the completions from step 3 on are generated anew" in caplog.text
    published.close()


@pytest.mark.parametrize("case", ["no rollouts", "another rank"])
def test_nothing_is_published(tmp_path: Path, case: str) -> None:
    parts = {} if case == "no rollouts" else {"rollout": {"max_new_tokens": 8, "weights": "directory"}}
    run = run_of(tmp_path, **parts)
    run.spec.output.mkdir()
    told: list[tuple[int, int, int]] = []
    published = publisher(run, told, writes=case == "no rollouts")
    published.after_rewind(0, 1)
    published.after_step(1, 1)
    published.close()
    assert not told and not list(run.spec.output.iterdir())
