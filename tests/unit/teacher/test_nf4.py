"""A teacher in NormalFloat 4: close to its own dtype, divided as whole, compiled; refused without bitsandbytes."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.runs import resolved_run
from tests.unit.teacher.test_shards import CPU, divided_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.models.loading import load_model, pick_device
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.teacher.prepare import TeacherModel, prepared_model
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
    run = divided_run(tmp_path, "qwen3", gpus=1, nf4=True, **SIZES)
    teacher = prepared_model(run, 0, pick_device(device, 0))
    exact = TeacherModel(load_model(run.spec.teacher[0], "teacher", teacher.device), longest=32)
    assert type(teacher.model.get_output_embeddings()) is nn.Linear
    assert teacher.nbytes < exact.nbytes
    assert 0 < deviation(teacher.hidden(TOKENS), exact.hidden(TOKENS)) < STATES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_parts_in_4_bits_give_the_results_of_a_whole_one(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    run = divided_run(tmp_path, kind, nf4=True, **SIZES)
    with started_shards(run, 0, [CPU, CPU]):
        part = prepared_model(run, 0, CPU)
        part.before_forward = send_tokens
        found = part.hidden(TOKENS)
    whole = prepared_model(divided_run(tmp_path, kind, gpus=1, nf4=True, **SIZES), 0, CPU)
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


def with_teacher(run: RunSpec, **changes: Any) -> RunSpec:
    raw = run.model_dump()
    return RunSpec.model_validate({**raw, "teacher": [{**raw["teacher"][0], **changes}]})


def test_4_bits_are_refused_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "xtoken_services.teacher.nf4", raising=False)
    run = resolved_run(tmp_path, device="cpu")
    check_launch(run.spec)
    spec = with_teacher(run.spec, nf4=True)
    with pytest.raises(ConfigError, match=r"teacher\.0\.nf4 needs bitsandbytes: install it by pip install 'xtoken\["):
        check_launch(spec)
    check_launch(with_teacher(spec, store="s3://x/y"))
    with pytest.raises(ConfigError, match=r"teacher: nf4 needs bitsandbytes \(.*\): install it by pip install 'xtoken"):
        prepared_model(run.model_copy(update={"spec": spec}), 0, CPU)


def test_two_formats_of_the_same_weights_are_refused(tmp_path: Path) -> None:
    run = resolved_run(tmp_path, device="auto")
    with pytest.raises(ValueError, match="fp8 and nf4 are two formats of the same weights: set one of them to false"):
        with_teacher(run.spec, fp8=True, nf4=True)
