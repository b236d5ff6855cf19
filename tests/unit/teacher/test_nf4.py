"""Teachers in 4 bits and the devices of their parts."""

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.runs import resolved_run, revised, revised_run
from tests.unit.teacher.test_shards import CPU, divided_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.models.loading import load_model, pick_device
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.teacher.prepare import TeacherModel, device_of, prepared_model
from xtoken_services.teacher.quantized import swap_linears
from xtoken_services.teacher.shards import send_tokens, started_shards

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
"""So that half of every weight's columns is whole blocks."""
WEIGHTS = 0.11
"""Relative error of a product with random normal weights: that of their values and 64 of a scale is 0.09 to 0.10."""
STATES = 0.25
"""Relative error of the hidden states of two layers, whose errors add up."""
TOKENS = torch.arange(3 * 24).view(3, 24) % 96


def deviation(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [(1,), (3, 5), (4, 512)], ids=str)
def test_a_layer_in_4_bits_is_close_to_the_layer(device: str, dtype: str, rows: tuple[int, ...]) -> None:
    pytest.importorskip("bitsandbytes")
    from xtoken_services.teacher.nf4 import Nf4Linear

    torch.manual_seed(0)
    layer = nn.Linear(256, 128, device=device, dtype=getattr(torch, dtype))
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(*rows, 256, device=device, dtype=layer.weight.dtype)
    small = Nf4Linear(layer)
    with torch.inference_mode():
        found, exact = small(x), layer(x)
    assert found.dtype == x.dtype and found.shape == exact.shape
    assert deviation(found - layer.bias, exact - layer.bias) < WEIGHTS
    assert sum(part.nbytes for part in small.buffers()) * 8 == 4.5 * layer.weight.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_a_teacher_in_4_bits_is_close_to_itself(tmp_path: Path, device: str) -> None:
    pytest.importorskip("bitsandbytes")
    run = divided_run(tmp_path, "qwen3", gpus=1, quantized="nf4", **SIZES)
    teacher = prepared_model(run, 0, pick_device(device, 0))
    exact = TeacherModel(load_model(run.spec.teacher[0], "teacher", teacher.device), longest=32)
    assert type(teacher.model.get_output_embeddings()) is nn.Linear
    assert teacher.nbytes < exact.nbytes
    assert 0 < deviation(teacher.hidden(TOKENS), exact.hidden(TOKENS)) < STATES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_parts_in_4_bits_give_the_results_of_a_whole_one(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    run = divided_run(tmp_path, kind, quantized="nf4", **SIZES)
    with started_shards(run, 0, [CPU, CPU]):
        part = prepared_model(run, 0, CPU)
        part.before_forward = send_tokens
        found = part.hidden(TOKENS)
    whole = prepared_model(divided_run(tmp_path, kind, gpus=1, quantized="nf4", **SIZES), 0, CPU)
    torch.testing.assert_close(found, whole.hidden(TOKENS), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_teacher_in_4_bits_gives_the_same(tmp_path: Path, device: str) -> None:
    pytest.importorskip("bitsandbytes")
    from xtoken_services.teacher.nf4 import Nf4Linear

    run = divided_run(tmp_path, "qwen3", gpus=1, **SIZES)
    model = load_model(run.spec.teacher[0], "teacher", torch.device(device))
    assert swap_linears(model.base_model, Nf4Linear) == 2 * 7
    compiled = TeacherModel(copy.deepcopy(model), compiled=True)
    for rows, width in ((3, 24), (1, 8)):
        tokens = torch.arange(rows * width).view(rows, width)
        assert deviation(compiled.hidden(tokens), TeacherModel(model).hidden(tokens)) < 0.02


def test_4_bits_are_refused_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "xtoken_services.teacher.nf4", raising=False)
    run = resolved_run(tmp_path, device="cpu")
    check_launch(run.spec)
    small = revised_run(run, teacher={"quantized": "nf4"})
    with pytest.raises(
        ConfigError, match=r"teacher\.0\.quantized needs bitsandbytes: install it by pip install bitsandbytes$"
    ):
        check_launch(small.spec)
    check_launch(revised(small.spec, teacher={"store": "s3://x/y"}))
    with pytest.raises(
        ConfigError, match=r"teacher: nf4 needs bitsandbytes \(.*\): install it by pip install bitsandbytes$"
    ):
        prepared_model(small, 0, CPU)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(logging.getLogger("xtoken"), "propagate", True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def spec_with(directory: Path, gpu: int | None, device: str = "auto") -> RunSpec:
    raw = resolved_run(directory, ranks=4, device=device).spec.model_dump()
    return RunSpec.model_validate({**raw, "teacher": [{**raw["teacher"][0], "gpu": gpu}]})


@pytest.mark.parametrize(("rank", "gpu", "told"), [(0, 0, False), (1, 1, False), (2, 0, True), (5, 1, True)])
def test_ranks_beyond_the_gpus_share_them_and_say_so(
    two_gpus: None, caplog: pytest.LogCaptureFixture, rank: int, gpu: int, told: bool
) -> None:
    assert pick_device("auto", rank) == torch.device("cuda", gpu)
    expected = [f"rank {rank} would be on GPU {rank}, torch sees 2 here: it shares cuda:{gpu}"] if told else []
    assert caplog.messages == expected


def test_a_rank_of_torchrun_is_its_own(
    two_gpus: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("cuda", 0) == torch.device("cuda", 1)
    assert caplog.messages == ["rank 3 would be on GPU 3, torch sees 2 here: it shares cuda:1"]


@pytest.mark.parametrize(
    ("gpu", "rank", "found", "told"),
    [
        (None, 1, 1, ""),
        (None, 3, 1, "rank 3 would be on GPU 3"),
        (1, 0, 1, ""),
        (0, 1, 1, ""),
        (1, 1, 0, "teacher of rank 1 (teacher.gpu = 1) would be on GPU 2"),
        (0, 3, 1, "teacher of rank 3 (teacher.gpu = 0) would be on GPU 3"),
    ],
)
def test_a_teacher_on_a_gpu_of_its_own_says_what_became_of_it(
    two_gpus: None, caplog: pytest.LogCaptureFixture, tmp_path: Path, gpu: int | None, rank: int, found: int, told: str
) -> None:
    assert device_of(spec_with(tmp_path, gpu), 0, rank) == torch.device("cuda", found)
    expected = [f"{told}, torch sees 2 here: it shares cuda:{found}"] if told else []
    assert caplog.messages == expected


def test_without_gpus_nothing_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(spec_with(tmp_path, 1), 0, 3) == pick_device("auto", 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        device_of(spec_with(tmp_path, 1, "cuda"), 0, 0)


def test_on_the_cpu_by_choice_no_gpu_is_taken(two_gpus: None, tmp_path: Path) -> None:
    assert device_of(spec_with(tmp_path, 1, "cpu"), 0, 3) == pick_device("cpu", 3) == torch.device("cpu")
