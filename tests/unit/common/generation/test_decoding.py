"""Decoding in memory of a fixed size: the tokens are those of the model's own cache."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from xtoken_services.common.generation.decoding import NAME, Batch, Decoder, log, size_for
from xtoken_services.common.generation.sampling import Sampled, Sampler, Sampling, seed_of
from xtoken_services.common.generation.vocabulary import Vocabulary

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


def sampler_of(model: PreTrainedModel, *, fixed_memory: bool) -> Sampler:
    allowed = torch.tensor([True] * 11 + [False] * 5, device=model.device)
    vocabulary = Vocabulary([b"a"] * 16, allowed, frozenset({END}), 0)
    return Sampler(model, vocabulary, Sampling(50, top_p=0.9), decoder=Decoder if fixed_memory else None)


def completions(sampler: Sampler, *, rows: int = ROWS, longest: int = 7) -> list[Sampled]:
    prompts = [torch.arange(1 + row % longest).numpy() % END for row in range(rows)]
    return sampler.complete(prompts, [seed_of(0, row, 0) for row in range(rows)], lambda: None)


def completed(model: PreTrainedModel, *, fixed_memory: bool) -> tuple[Sampler, list[Sampled]]:
    sampler = sampler_of(model, fixed_memory=fixed_memory)
    return sampler, completions(sampler)


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
    assert sampler._decoder.sizes == [24, 8][:sizes]
    assert model.config._attn_implementation == NAME


class RecordedStep:
    """Stand-in for a CUDA graph: what is captured does not run, and a replay runs it."""

    batch: weakref.ref[Batch]
    works = True

    def replay(self) -> None:
        batch = self.batch()
        if self.works and batch is not None:
            batch._decode()


@pytest.fixture(params=[True, False], ids=["works", "empty"])
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let a CPU decode as a GPU does, with graphs that work, or that do nothing; return which."""
    stream, current, real = SimpleNamespace(wait_stream=lambda _: None), list[Batch](), Batch.capture
    graphs_of: dict[int, weakref.WeakSet[RecordedStep]] = {}

    @contextmanager
    def graph(step: RecordedStep, **options: Any) -> Iterator[None]:
        graphs = graphs_of.setdefault(options["pool"], weakref.WeakSet([step]))
        assert graphs, "torch takes a handle until its last graph is gone"
        graphs.add(step)
        step.batch, step.works = weakref.ref(current[0]), request.param
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "_decode", lambda _: None)
            yield

    def capture(batch: Batch, _: Any) -> None:
        current[:] = [batch]
        real(batch, stream)
        current.clear()

    handles = itertools.count()
    stand_ins = {
        "current_stream": lambda: stream, "set_stream": lambda _: None, "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(), "synchronize": lambda: None, "CUDAGraph": RecordedStep, "graph": graph,
        "graph_pool_handle": lambda: next(handles), "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Batch, "capture", capture)
    return bool(request.param)


def test_steps_that_are_captured_give_the_same_tokens(recorded: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The second prompts are longer: the memory grows, and all graphs are captured again."""
    model = model_of("llama")
    own, graphs = (sampler_of(model, fixed_memory=fixed_memory) for fixed_memory in (False, True))
    decoder = graphs._decoder
    assert decoder is not None
    decoder.pool = torch.cuda.graph_pool_handle()
    for rows, longest, sizes in ((9, 3, [16, 8]), (20, 60, [24, 8])):
        check_same(completions(own, rows=rows, longest=longest), completions(graphs, rows=rows, longest=longest))
        assert decoder.sizes == sizes
    assert (decoder.pool is not None) == recorded
    assert ("a step by the graph differs from one without it" in caplog.text) == (not recorded)


def test_batches_that_continue_others_have_few_sizes() -> None:
    assert [size_for(rows) for rows in (1, 8, 9, 17, 33, 64)] == [8, 8, 16, 32, 64, 64]


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("gemma3", {}), *(("llama", sampling) for sampling in ({"top_p": 0.9}, {"top_k": 5}, {"temperature": 0}))],
)
def test_a_step_reads_nothing_back_to_the_host(family: str, sampling: dict[str, Any]) -> None:
    """It would be no graph: tensors without values refuse to be read, and to meet those of another device."""
    model = model_of(family).to(torch.bfloat16).to("meta")  # type: ignore[arg-type]
    vocabulary = Vocabulary([b"a"] * 16, torch.ones(16, dtype=torch.bool, device="meta"), frozenset({END}), 0)
    sampler = Sampler(model, vocabulary, Sampling(128, **sampling), decoder=Decoder)
    decoder = sampler._decoder
    assert decoder is not None
    prompt = torch.zeros(3, 5, dtype=torch.int64, device="meta")
    decoder.reserve(model(prompt, use_cache=True).past_key_values, 8 * 64)
    Batch(decoder, 8, 64).step()


class OwnMaskOnly(LlamaForCausalLM):
    """A model that builds its mask from one of two dimensions."""

    refused = 0

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, **options: Any) -> Any:
        if attention_mask.dim() != 2:
            self.refused += 1
            raise ValueError("the mask has four dimensions")
        return super().forward(input_ids, attention_mask, position_ids, **options)


def test_a_model_that_takes_no_mask_of_four_dimensions_keeps_its_own_cache() -> None:
    torch.manual_seed(0)
    model = OwnMaskOnly(LlamaConfig(**SHAPE)).eval()
    sampler = sampler_of(model, fixed_memory=True)
    expected = completions(sampler_of(model_of("llama"), fixed_memory=False))
    for _ in range(2):
        check_same(expected, completions(sampler))
    assert model.refused == 1


@pytest.mark.gpu
def test_graphs_are_captured_again_for_longer_prompts_on_any_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """The memory grows and all graphs are dropped; the current device is another one where there are several GPUs."""
    model = model_of("llama", f"cuda:{torch.cuda.device_count() - 1}")
    own, graphs = (sampler_of(model, fixed_memory=fixed_memory) for fixed_memory in (False, True))
    for rows, longest in ((ROWS, 7), (44, 80), (9, 3)):
        expected, found = (completions(sampler, rows=rows, longest=longest) for sampler in (own, graphs))
        assert sum(one.ids == other.ids for one, other in zip(expected, found, strict=True)) >= rows - 4
    assert not [record for record in caplog.records if record.name == log.name]


@pytest.mark.gpu
def test_graphs_have_the_tokens_of_single_kernels() -> None:
    model = model_of("llama", "cuda")
    sampler, own = completed(model, fixed_memory=True)
    assert sampler._decoder.sizes == [24, 8]
    check_same(own, completed(model, fixed_memory=True)[1])
    _, expected = completed(model, fixed_memory=False)
    same = sum(one.ids == other.ids for one, other in zip(expected, own, strict=True))
    assert same >= ROWS - 2  # a rounding may choose another token
