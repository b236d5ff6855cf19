"""Several ranks, real processes over gloo: they train as one would, and go on from each other's checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpointed import run_directory
from tests.support.ranks import start_ranks
from tests.unit.trainer.students import make_model
from xtoken_services.trainer.export_checkpoint import export_checkpoint

FSDP = {"train": {"parallel": "fsdp"}}
KEPT = {"train": {"parallel": "fsdp", "reshard_after_forward": False}}
REPLICATE = {"train": {"parallel": "replicate"}}
BF16 = {"student": {"dtype": "bfloat16"}}


def run(directory: Path, ranks: int, case: dict[str, Any]) -> dict[str, Any]:
    """Train with so many processes; what the first one has left."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.unit.trainer.rank_process", str(directory), json.dumps(case)]
    processes = start_ranks(command, ranks)
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    return dict(torch.load(directory / "result.pt", weights_only=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank makes of all steps."""
    return run(tmp_path_factory.mktemp("alone"), 1, {"until": 4})


def same(found: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(
            found["state"][name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def exported_whole(directory: Path, case: dict[str, Any], found: dict[str, Any]) -> None:
    """The checkpoint of several ranks makes one model, without them."""
    run_directory(directory, make_model(), positions=32, **case)
    model = AutoModelForCausalLM.from_pretrained(export_checkpoint(directory).target)
    weights = {f"model.{name}": weight for name, weight in model.named_parameters()}
    assert weights.keys() == {name for name in found["state"] if name.startswith("model.")}
    assert weights.keys() == {f"model.{name}" for name in found["published"]}
    for name, weight in weights.items():
        assert torch.equal(weight, found["state"][name]), name
        published = found["published"][name.removeprefix("model.")]
        assert torch.equal(published, weight.to(published.dtype)), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [FSDP, KEPT, REPLICATE], ids=["fsdp", "fsdp, weights kept", "replicate"])
def test_two_ranks_sum_their_gradients_and_one_goes_on_from_their_checkpoint(
    tmp_path: Path, alone: dict[str, Any], case: dict[str, Any]
) -> None:
    two = run(tmp_path, 2, {**case, "until": 2})
    torch.testing.assert_close(two["norms"], alone["norms"][:2], rtol=1e-4, atol=0)
    exported_whole(tmp_path, case, two)
    one = run(tmp_path, 1, {**case, "until": 4})
    torch.testing.assert_close(one["norms"], alone["norms"][2:], rtol=1e-4, atol=0)
    same(one, alone, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(one["logits"], alone["logits"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_shares_of_two_ranks_come_from_one_rank_and_compute_in_bfloat16(tmp_path: Path, family: str) -> None:
    case = {**BF16, "family": family}
    expected = run(tmp_path / "alone", 1, {**case, "until": 4})
    run(tmp_path / "both", 1, {**case, "until": 2})
    kept = shutil.copytree(tmp_path / "both", tmp_path / "fsdp")
    found = run(kept, 2, {**case, **FSDP, "until": 4})
    assert {value.dtype for value in found["state"].values()} == {torch.float32}
    torch.testing.assert_close(found["norms"], expected["norms"][2:], rtol=0.02, atol=0)
    same(found, expected, rtol=0.05, atol=2e-3)


@pytest.mark.slow
def test_two_ranks_in_bfloat16_add_up_alike_in_bfloat16_and_float32(tmp_path: Path) -> None:
    """A sum of two that is rounded once is the same sum, whichever dtype it travels in."""
    pure = {"parallel": "fsdp", "master_weights": False}
    found = [
        run(tmp_path / dtype, 2, {**BF16, "train": {**pure, "reduce_dtype": dtype}, "until": 4})
        for dtype in ("float32", "bfloat16")
    ]
    same(found[1], found[0], rtol=0, atol=0)


def test_rollout_workers_get_whole_weights_with_adapters_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "learning_rate": 0.05}
    one = run(tmp_path / "one", 1, {"until": 4, "train": lora})
    two = run(tmp_path / "two", 2, {"until": 4, "train": {**lora, **FSDP["train"]}})
    first = dict(make_model().named_parameters())
    assert one["published"].keys() == two["published"].keys() == first.keys()
    for name, weight in one["published"].items():
        torch.testing.assert_close(two["published"][name], weight, rtol=1e-3, atol=1e-4)
        assert torch.equal(weight, first[name]) == (name.split(".")[-2] not in ("q_proj", "v_proj")), name
