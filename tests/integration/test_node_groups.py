"""Several node groups, all on this machine: what they train together is what one group with as many ranks trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import Crew
from tests.support.tiny_run import TinyAssets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec

Start = Callable[[RunSpec], Crew]


@pytest.mark.slow
def test_two_groups_take_the_steps_of_one_with_two_ranks(assets: TinyAssets, tmp_path: Path, start: Start) -> None:
    """The last step is short, and the second group has no share of it. Chosen columns would depend on micro-batches."""
    changes: dict[str, Any] = {"records": 28, "queue": {"block_size": 2}, "loss": {"vocab_topk": None}}
    one = tiny_spec(assets, tmp_path / "one", **changes, workers={"ranks": 2, "collators": 1})
    two = tiny_spec(assets, tmp_path / "two", **changes, workers={"nodes": 2, "collators": 1})
    for spec in (one, two):
        start(spec).complete()
    lines = [steps_of(spec.output) for spec in (one, two)]
    assert [i for line in lines[1] for i in line["ids"]] == list(range(28))
    for name in ("loss", "kl_loss", "ce_loss", "grad_norm"):
        found = [torch.tensor([line[name] for line in of_run]) for of_run in lines]
        torch.testing.assert_close(
            found[1], found[0], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert [line["tokens"] for line in lines[0]] == [line["tokens"] for line in lines[1]]
    weights = [load_file(spec.output / "model" / "model.safetensors") for spec in (one, two)]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["node1-queue", "node1-trainer-0", "node1-teacher-0-0", "node1-collator-0"])
def test_a_process_of_one_group_is_killed_and_every_position_is_trained_once(
    assets: TinyAssets, tmp_path: Path, start: Start, victim: str
) -> None:
    spec = tiny_spec(assets, tmp_path, records=160, workers={"nodes": 2, "collators": 1})
    crew = start(spec)
    crew.wait_for_steps(5)
    crew.kill(victim)
    crew.complete()
    assert sorted(i for line in steps_of(spec.output) for i in line["ids"]) == list(range(160))
