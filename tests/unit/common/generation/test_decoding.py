"""Decoding in memory of a fixed size: the tokens are those of the model's own cache."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from services.common.generation.decoding import NAME
from services.common.generation.sampling import Sampled, Sampler, seed_of
from services.common.generation.vocabulary import Vocabulary
from xtoken_core.config.rollout import RolloutSpec

END = 10
SHAPE = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=512)),
    "gemma3-window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=32)),
}
ROWS = 20


def model_of(family: str, device: str = "cpu") -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]().eval().to(device)  # type: ignore[no-any-return]


def completed(model: PreTrainedModel, *, fixed_memory: bool) -> tuple[Sampler, list[Sampled]]:
    allowed = torch.tensor([True] * 11 + [False] * 5, device=model.device)
    vocabulary = Vocabulary([b"a"] * 16, allowed, frozenset({END}), 0)
    settings = RolloutSpec.model_validate({"max_new_tokens": 50, "top_p": 0.9})
    sampler = Sampler(model, vocabulary, settings, fixed_memory=fixed_memory)
    prompts = [torch.arange(1 + row % 7).numpy() for row in range(ROWS)]
    return sampler, sampler.complete(prompts, [seed_of(0, row, 0) for row in range(ROWS)], lambda: None)


def check_same(expected: list[Sampled], own: list[Sampled]) -> None:
    assert [row.ids for row in own] == [row.ids for row in expected]
    for one, other in zip(expected, own, strict=True):
        assert other.entropy == pytest.approx(one.entropy, rel=1e-4)
        assert other.log_probs == pytest.approx(one.log_probs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("family", "sizes"), [("llama", 2), ("gemma3", 2), ("gemma3-window", 0)])
def test_tokens_are_those_of_the_models_own_cache(family: str, sizes: int) -> None:
    """Finished rows leave the batch; a layer that forgets what is outside its window is left to the model's cache."""
    model = model_of(family)
    _, expected = completed(model, fixed_memory=False)
    assert len({len(row.ids) for row in expected}) > 5
    sampler, own = completed(model, fixed_memory=True)
    check_same(expected, own)
    assert sampler.batch_sizes == [24, 8][:sizes]
    assert model.config._attn_implementation == NAME


@pytest.mark.gpu
def test_graphs_have_the_tokens_of_single_kernels() -> None:
    model = model_of("llama", "cuda")
    sampler, own = completed(model, fixed_memory=True)
    assert sampler.batch_sizes == [24, 8]
    check_same(own, completed(model, fixed_memory=True)[1])
    _, expected = completed(model, fixed_memory=False)
    same = sum(one.ids == other.ids for one, other in zip(expected, own, strict=True))
    assert same >= ROWS - 2  # a rounding may choose another token
