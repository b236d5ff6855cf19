"""Runs whose teacher's output comes from a store: built by the real processes, read by a run without a teacher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.store_build import build_spec
from services.supervisor.local_run import run_to_end
from services.supervisor.run_record import RunState
from services.supervisor.store_build import StoreBuild
from tests.integration.conftest import Crew
from tests.support.tiny_run import TinyAssets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.teacher_store.store import TeacherStore

Start = Callable[[RunSpec], Crew]


def build(spec: RunSpec, store: Path) -> TeacherStore:
    """Build the store of a run's only teacher."""
    result = run_to_end(StoreBuild(build_spec(spec, None, str(store)), str(store)), show=False)
    assert result.state == RunState.COMPLETED, result.error
    return TeacherStore.open(str(store))


def of_store(spec: RunSpec, store: Path, output: Path) -> RunSpec:
    """The same run, its teacher read from a store."""
    teacher = spec.teacher[0].model_copy(update={"store": str(store)})
    return RunSpec.model_validate(spec.model_copy(update={"teacher": (teacher,), "output": output}).model_dump())


def losses(spec: RunSpec, start: Start, positions: int) -> torch.Tensor:
    """The losses of a run that ended well, having trained each position once."""
    ending = start(spec).join()
    assert ending.state == RunState.COMPLETED, ending.error
    steps = steps_of(spec.output)
    assert [i for line in steps for i in line["ids"]] == list(range(positions))
    return torch.tensor([line["loss"] for line in steps])


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("content", [{"content": "hidden"}, {"content": "topk", "topk": 1000}])
def test_a_run_from_a_store_equals_one_with_the_living_teacher(
    assets: TinyAssets, tmp_path: Path, start: Start, content: dict[str, Any], packing: str
) -> None:
    teacher = {"model": assets.teacher, "context_length": 96, "projection": assets.projection, **content}
    changes: dict[str, Any] = {"loss": {"vocab_topk": None}, "train": {"packing": packing}, "data": {"epochs": 2}}
    spec = tiny_spec(assets, tmp_path, records=48, teacher=[teacher], **changes)
    living = losses(spec, start, 96)
    store = build(spec, tmp_path / "store")
    assert sorted(store.entries) == list(range(48))
    stored = of_store(spec, tmp_path / "store", tmp_path / "stored")
    torch.testing.assert_close(losses(stored, start, 96), living, rtol=1e-5, atol=1e-6)
    last = steps_of(stored.output)[-1]
    assert last["store_hits"] == 8
    assert last["store_misses"] == 0
    assert last["store_bytes"] > 0
    assert not list((stored.output / "logs").glob("teacher*"))
