"""Ranks of a trainer: shares, reductions over nodes, and a peer that is gone."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpointed import run_directory
from tests.support.ranks import run_ranks, start_ranks
from tests.support.runs import resolved_run
from tests.unit.trainer.students import make_model
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.export_checkpoint import export_checkpoint

FSDP = {"train": {"parallel": "fsdp"}}
KEPT = {"train": {"parallel": "fsdp", "reshard_after_forward": False}}
REPLICATE = {"train": {"parallel": "replicate"}}
BF16 = {"student": {"dtype": "bfloat16"}}


def run(directory: Path, ranks: int, case: dict[str, Any]) -> dict[str, Any]:
    """Train with so many processes; what the first one has left."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.unit.trainer.rank_process", str(directory), json.dumps(case)]
    run_ranks(command, ranks)
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


@pytest.mark.slow
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


RANKS = 4


@pytest.mark.slow
def test_groups_agree_on_counts_denominators_and_what_has_become_of_all_positions(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.trainer.share_process", str(tmp_path / "said.json")]
    run_ranks(command, RANKS)
    said = json.loads((tmp_path / "said.json").read_text())
    assert [rank["node"] for rank in said] == [0, 0, 1, 1]
    assert [rank["leads"] for rank in said] == [[True, True], [False, False], [False, True], [False, False]]
    assert [rank["rewinds"] for rank in said] == [100, 100, 102, 102]  # each group's own first rank's
    for rank in said:
        assert rank["micro_batches"] == [2, 2]  # the first group's, also where there is no row at all
        assert rank["denominators"] == [7 + 8, 20 + 21, 3, 1]
        assert rank["account"] == {"ids": [0, 1, 2], "skipped": {"3": "empty"}, "dead": {"4": "refused"}}
    assert [rank["own"] for rank in said] == [[[0, 1, 2], [], []]] * 2 + [[[], [3], [4]]] * 2


def test_a_group_owns_its_share_of_every_step(tmp_path: Path) -> None:
    run = resolved_run(tmp_path, nodes=4)
    groups = [run.model_copy(update={"group": group}) for group in range(4)]
    assert [[p for p in range(16) if group.owns(p)] for group in groups] == [
        [0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15],
    ]  # fmt: skip
    assert run.world == 4


@pytest.mark.parametrize(("rank", "node"), [(0, 0), (2, 0), (3, 1), (5, 1)])
def test_ranks_are_shared_out_in_order(rank: int, node: int) -> None:
    group = RankGroup(0, 1)
    group.rank, group.size, group.nodes = rank, 6, 2
    assert group.node == node


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "raise"])
def test_a_hanging_rank_ends_when_another_is_killed_or_fails(how: str) -> None:
    first, second = start_ranks([sys.executable, "-m", "tests.unit.trainer.hanging_process", how], 2)
    try:
        for rank in (first, second):
            assert rank.stdout.readline() == "met\n"
        if how == "hang":
            second.kill()
        _, errors = first.communicate(timeout=60)
        assert first.returncode == 1, errors
        assert "another rank has failed or was killed" in errors
        assert second.wait(timeout=60) == (1 if how == "raise" else -9)
    finally:
        for rank in (first, second):
            rank.kill()
            rank.communicate()
