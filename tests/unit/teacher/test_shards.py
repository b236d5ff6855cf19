"""A teacher divided over two processes: results as of one, refusals, the end of its processes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.support.runs import changed, resolved_run, revised_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.packing import PackedRow
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.models.tensor_parallel import DIVIDED, FAMILIES, QUANTIZED, check_divided, why_not_divided
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.teacher.prepare import Fp8Linear, TeacherModel, devices_of, prepared_model
from xtoken_services.teacher.quantized import swap_linears
from xtoken_services.teacher.shards import send_tokens, started_shards

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
CPU = torch.device("cpu")


def divided_run(directory: Path, kind: str, *, gpus: int = 2, packed: bool = True, **changes: Any) -> ResolvedRun:
    """A run whose teacher is a small model of a family, with random weights and biases."""
    torch.manual_seed(0)
    defaults = AutoConfig.for_model(kind)
    own = {name: changes.pop(name) for name in SIZES.keys() & changes.keys()}
    sizes = {name: value for name, value in (SIZES | own).items() if hasattr(defaults, name)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(directory / kind)
    teacher = {"model": directory / kind, "gpus": gpus, "context_length": 32, **changes}
    return revised_run(resolved_run(directory, device="cpu"), teacher=teacher).model_copy(update={"packed": packed})


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_divided_teacher_gives_the_results_of_a_whole_one(tmp_path: Path, kind: str) -> None:
    run = divided_run(tmp_path, kind)
    spec = run.spec.teacher[0]
    whole = TeacherModel(load_model(spec, "teacher", CPU, packed=True), longest=32)
    tokens = torch.arange(3 * 24).view(3, 24) % 96
    row, packed = PackedRow((7, 12, 4), 24), tokens[:1]
    with started_shards(run, 0, [CPU, CPU]), torch.inference_mode():
        part = prepared_model(run, 0, CPU)
        part.before_forward = send_tokens
        assert part.nbytes < whole.nbytes
        logits = torch.empty(3, 24, 96)
        part.write_logits(tokens, logits)
        hidden = part.hidden(packed, row)
    expected = torch.empty_like(logits)
    whole.write_logits(tokens, expected)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden[:, :23], whole.hidden(packed, row)[:, :23], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_parts_in_8_bits_give_nearly_the_results_of_a_whole_one(tmp_path: Path, kind: str) -> None:
    """Biases are added once, sums are over both parts; only the scales of what is summed differ."""
    run = divided_run(tmp_path, kind, dtype="bfloat16", hidden_size=64, intermediate_size=128, head_dim=16)
    (tmp_path / "run.json").write_text(run.model_dump_json())
    run_ranks([sys.executable, str(Path(__file__).with_name("fp8_part.py")), str(tmp_path)], 2)
    model = load_model(run.spec.teacher[0], "teacher", CPU)
    tokens = torch.arange(3 * 24).view(3, 24) % 96
    with torch.inference_mode():
        exact = TeacherModel(model, longest=32).hidden(tokens)
        assert swap_linears(model.base_model, Fp8Linear) == 2 * 7
        whole = TeacherModel(model, longest=32).hidden(tokens)
    parts = load_file(tmp_path / "states.safetensors")["states"]
    assert not torch.equal(parts, exact)
    for other in (exact, whole):
        assert (parts - other).float().norm() / exact.float().norm() < 0.1


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family_has_a_plan_of_the_settings_that_are_checked(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    assert config.base_model_tp_plan
    named = {style for name, style in config.base_model_tp_plan.items() if "self_attn.o_proj" in name}
    assert named <= {"rowwise", "rowwise_split_input", "rowwise_rep"}
    assert {"num_attention_heads", "num_key_value_heads"} <= {name for name in DIVIDED if hasattr(config, name)}
    styles = {style for name, style in config.base_model_tp_plan.items() if name.startswith("layers.")}
    assert (styles <= {"colwise", "rowwise", "replicated_with_grad_allreduce"}) == (kind in QUANTIZED)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt2"}, 'the model type "gpt2" has no known tensor-parallel plan'),
        ({"model_type": "qwen3", "num_attention_heads": 14}, "num_attention_heads = 14 cannot be divided by 4"),
        ({"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"model_type": "olmo2"}, "is not divided with quantized layers"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_divided("teacher", Path("models/teacher"), config, 4, quantized="fp8")
    check_divided("teacher", Path("models/teacher"), config, 1, quantized="fp8")
    assert (
        why_not_divided({**config, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}, 4)
        is None
    )


@pytest.mark.parametrize(
    ("settings", "reason"), [({"compile": True}, "compile = true"), ({"store": "s3://x/y"}, "unset gpus")]
)
def test_settings_of_one_gpu_are_refused_beside_several(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        divided_run(tmp_path, "llama", **settings)


def test_a_teacher_s_parts_take_neighbouring_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    spec = changed(divided_run(tmp_path, "llama"), workers={"device": "cuda", "ranks": 2}).spec
    assert [str(device) for device in devices_of(spec, 0, 1)] == ["cuda:2", "cuda:3"]
    assert (spec.gpus_needed, spec.teacher_processes) == (4, 4)
    with pytest.raises(ConfigError, match=r"takes GPUs 4 to 5 \(teacher\.gpus = 2\), torch sees 4 here"):
        devices_of(spec, 0, 2)


def test_more_gpus_than_there_are_are_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = divided_run(tmp_path, "llama").spec.model_dump()
    spec = RunSpec.model_validate({**raw, "workers": {"device": "auto"}})
    for count in (0, 2):
        monkeypatch.setattr("xtoken_services.supervisor.launch_check.count_gpus", lambda count=count: count)
        check_launch(spec)
    monkeypatch.setattr("xtoken_services.supervisor.launch_check.count_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"teacher\.0\.gpus: the run takes 2 GPUs, this machine has 1: lower"):
        check_launch(spec)
