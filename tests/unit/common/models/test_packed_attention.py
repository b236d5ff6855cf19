"""Models on packed rows: every sample's states and gradients are those of the sample alone."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.support.runs import resolved_run
from tests.unit.trainer import students
from xtoken_core.errors import ConfigError
from xtoken_core.packing import PackedRow
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.models.packable import FAMILIES, why_not_packed
from xtoken_services.common.models.packed_attention import NAME, check_packing, packed_attention, packed_inputs

SIZES = students.SIZES | {"head_dim": 16, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHANGES = {
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {"num_key_value_heads": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "starcoder2": {"sliding_window": 4},
}
LENGTHS = (7, 1, 12, 5)
LOGITS, GRADIENTS = OUTPUT["chunk", torch.float32], GRADIENT["chunk", torch.float32]
COMMON = ("gemma3_text", "llama", "mixtral", "qwen3_moe")
"""Families of the default run; the others are marked slow."""


def make_model(family: str):
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(SIZES | CHANGES.get(family, {})))
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()


def packed_and_alone(model, lengths=LENGTHS, width=28):
    """Logits of a packed row and of each sample alone, and the row's layout."""
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(1, 96, (1, length), generator=generator) for length in lengths]
    row = PackedRow(lengths, width)
    ids = torch.cat([*samples, torch.zeros(1, width - sum(lengths), dtype=torch.int64)], dim=1)
    packed = model(input_ids=ids, use_cache=False, **packed_inputs(row, model.device, longest=16)).logits
    return packed, [model(input_ids=sample, use_cache=False).logits for sample in samples], row


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in COMMON else [pytest.mark.slow]) for f in sorted(FAMILIES)]
)
def test_a_packed_sample_has_the_logits_and_gradients_of_the_sample_alone(family):
    model = make_model(family)
    packed, alone, row = packed_and_alone(model)
    for part, expected in zip(row.slices(), alone, strict=True):
        assert_within(packed[:, part], expected, LOGITS, "logits")
    gradients = []
    for logits in ([packed[:, part] for part in row.slices()], alone):
        model.zero_grad()
        sum((x.log_softmax(-1)[..., 0]).sum() for x in logits).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_within(gradient, gradients[1][name], GRADIENTS, name)
    check_packing(model, "student")


def test_a_padded_batch_is_computed_as_ever():
    model = make_model("mistral")
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = model(input_ids=ids).logits
    model.set_attn_implementation("sdpa")
    assert_within(model(input_ids=ids).logits, expected, LOGITS, "logits")


def test_recomputed_activations_see_the_same_segments():
    model = make_model("llama").train()
    packed, _, row = packed_and_alone(model)
    packed[:, next(row.slices())].sum().backward()
    expected = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed, _, row = packed_and_alone(model)
    packed[:, next(row.slices())].sum().backward()
    assert_within(model.model.embed_tokens.weight.grad, expected, GRADIENTS, "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "shared", "width"), [(4, 2, 64), (4, 4, 128), (2, 1, 256)])
def test_flash_attention_on_a_gpu_is_that_of_each_segment_without_waiting(window, heads, shared, width):
    generator = torch.Generator(device="cuda").manual_seed(4)
    inputs = packed_inputs(PackedRow(LENGTHS, 28), torch.device("cuda"), longest=16)
    segments = inputs["segments"]
    assert segments.flash
    shapes = [(1, count, 28, width) for count in (heads, shared, shared)]
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    states = [torch.randn(shape, **options) for shape in shapes]
    upstream = torch.randn(1, 28, heads, width, **options)
    results = []
    for flash in (True, False):
        leaves = [x.clone().requires_grad_() for x in states]
        made = replace(segments, flash=flash)
        torch.cuda.set_sync_debug_mode("error" if flash else "default")
        try:
            out, _ = packed_attention(None, *leaves, None, scaling=0.1, sliding_window=window, segments=made)
            out.backward(upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([out.detach(), *(x.grad for x in leaves)])
    bounds = [OUTPUT["row", torch.bfloat16], *[GRADIENT["gather", torch.bfloat16]] * 3]
    for name, flash, expected, bound in zip(("out", "query", "key", "value"), *results, bounds, strict=True):
        assert_within(flash, expected, bound, name, slack=2.0)


def test_a_model_that_mixes_samples_is_refused():
    model = make_model("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"teacher 0's model mixes the samples.*train.packing"):
        check_packing(model, "teacher 0")


def test_a_loaded_model_takes_packed_rows(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    spec = resolved_run(tmp_path).spec.student.model_copy(update={"model": tmp_path})
    model = load_model(spec, "student", torch.device("cpu"), packed=True)
    packed, alone, row = packed_and_alone(model)
    assert_within(packed[:, next(row.slices())], alone[0], LOGITS, "logits")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, None),
        ({"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, None),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, None),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"model_type": "llama", "rope_parameters": {"full": {"rope_type": "dynamic"}}}, "dynamic"),
        ({"model_type": "mamba2"}, "mamba2"),
        ({"model_type": "gemma", "attn_logit_softcapping": 50.0}, "caps"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_what_can_be_packed_is_read_from_the_configuration(config, why):
    found = why_not_packed(config, 64)
    assert found is None if why is None else why in found


def test_a_layout_numbers_samples_and_positions():
    row = PackedRow((2, 0, 3), 8)
    assert row.positions().tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert row.samples().tolist() == [[0, 0, 2, 2, 2, 2, 2, 2]]
    assert row.boundaries().tolist() == [0, 2, 5, 8]
    assert [(part.start, part.stop) for part in row.slices()] == [(0, 2), (2, 2), (2, 5)]
    with pytest.raises(ValueError, match="do not fit"):
        PackedRow((5, 4), 8)
