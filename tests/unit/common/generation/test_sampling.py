"""Sampling: the distribution, own random numbers per row, ends, stop strings, valid text."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.support.cases import cases
from tests.support.vocabularies import byte_level, tekken, wordpiece
from xtoken_core.errors import ConfigError
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.generation import sampling
from xtoken_services.common.generation.sampling import Sampled, Sampler, Sampling, choose, seed_of, spelled_text
from xtoken_services.common.generation.vocabulary import Vocabulary, any_token_of, end_tokens, vocabulary_of
from xtoken_services.common.text.prompts import prompt_of

PIECES = [bytes([letter]) for letter in b"abcdefghij"] + [b"", "é".encode()[:1], "é".encode()[1:]]
END = 10
PROMPTS = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def sampler(model: LlamaForCausalLM, **settings: Any) -> Sampler:
    allowed = torch.tensor([True] * 11 + [False] * 5)
    vocabulary = Vocabulary(PIECES, allowed, frozenset({END}), 0)
    return Sampler(model, vocabulary, Sampling(**{"max_new_tokens": 12, **settings}))


def completed(model: LlamaForCausalLM, rows: list[int], **settings: Any) -> list[list[int]]:
    seeds = [seed_of(0, row, 0) for row in rows]
    sampled = sampler(model, **settings).complete([PROMPTS[row] for row in rows], seeds, lambda: None)
    return [each.ids for each in sampled]


def test_a_completion_ends_at_every_end_of_the_models_settings_and_of_the_tokenizer(model: LlamaForCausalLM) -> None:
    tokenizer = TextTokenizer(tekken(2000), "student")
    defaults = GenerationConfig(eos_token_id=[7, 9])
    model.generation_config, before = defaults, model.generation_config
    found = vocabulary_of(tokenizer, end_tokens(model), width=16)
    model.generation_config = before
    assert found.ends == {7, 9, tokenizer.eos_id}
    assert found.allowed[[7, 9]].all()


def test_a_completion_may_end_by_what_ends_an_answer_of_its_chat_template() -> None:
    """A base model that borrows a chat model's template learns to end its answers by another token than its texts."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    turn, eos = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id
    for after, ends in (
        ("<|im_end|>\n", {eos, turn}),
        ("{{ eos_token }}", {eos}),
        ("\n<|im_end|>", {eos}),
        (None, {eos}),
    ):
        template = None if after is None else "{% for m in messages %}" + "{{ m.content }}" + after + "{% endfor %}"
        tokenizer.chat_template = template
        found = vocabulary_of(TextTokenizer(tokenizer, "student"), eos, width=len(tokenizer))
        assert found.ends == ends
        assert bool(found.allowed[turn]) == (turn in ends)


def test_a_row_is_sampled_alike_whatever_shares_its_batch(model: LlamaForCausalLM) -> None:
    together = completed(model, [0, 1, 2])
    assert together == [completed(model, [row])[0] for row in range(3)]
    assert together[0] != completed(model, [1])[0]


def test_greedy_tokens_are_those_of_the_model_without_a_cache(model: LlamaForCausalLM) -> None:
    [sampled] = sampler(model, temperature=0.0).complete(PROMPTS[:1], [0], lambda: None)
    row, entropy = PROMPTS[0].tolist(), 0.0
    for token, log_prob in zip(sampled.ids, sampled.log_probs, strict=True):
        whole = model(torch.tensor([row])).logits[0, -1].detach()
        assert log_prob == pytest.approx(float(whole.log_softmax(-1)[token]), rel=1e-4)
        logits = whole[:11]
        assert int(logits.argmax()) == token
        entropy += float(torch.distributions.Categorical(logits=logits).entropy())
        row.append(token)
    assert sampled.entropy == pytest.approx(entropy, rel=1e-4)


def test_greedy_tokens_are_those_of_transformers(model: LlamaForCausalLM) -> None:
    """Prompts of other lengths are padded on the left in both."""
    allowed = torch.ones(16, dtype=torch.bool)
    own = Sampler(model, Vocabulary([b"a"] * 16, allowed, frozenset({END}), 0), Sampling(20, temperature=0))
    made = own.complete(PROMPTS, [0, 1, 2], lambda: None)
    ids = torch.tensor([[1, 2, 3], [0, 0, 4], [0, 5, 6]])
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=END, pad_token_id=0)
    expected = model.generate(ids, attention_mask=(ids != 0).long(), generation_config=config)[:, 3:].tolist()
    for row, whole in zip(made, expected, strict=True):
        assert row.ids == whole[: len(row.ids)]
        assert row.ends or len(row.ids) == 20


class Recorded:
    """The model's forward pass; the numbers of rows are kept."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.rows = model, list[int]()

    def __call__(self, **inputs: Any) -> Any:
        """Compute."""
        self.rows.append(len(inputs["input_ids"]))
        return self.model(**inputs)


def recorded(
    model: LlamaForCausalLM,
    prompts: list[np.ndarray],
    *,
    seeds: Sequence[int] = range(24),
    any_rank: Callable[[bool], bool] = bool,
) -> tuple[list[Sampled], list[int]]:
    """Return completions, whose end is likely, and the rows of each forward pass."""
    forward = Recorded(model)
    vocabulary = Vocabulary(PIECES, torch.tensor([True] * 11 + [False] * 5), frozenset({3, END}), 0)
    own = Sampler(model, vocabulary, Sampling(24, top_p=0.95), forward=forward, any_rank=any_rank)
    return own.complete(prompts, [seed_of(0, row, 0) for row in seeds[: len(prompts)]], lambda: None), forward.rows


@pytest.mark.parametrize("selects", [True, False], ids=["narrows", "keeps-all-rows"])
def test_rows_that_leave_the_batch_and_prompts_computed_once_change_no_completion(
    model: LlamaForCausalLM, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that holds more than keys and values is not selected from."""
    if not selects:
        monkeypatch.setattr(sampling, "fixed", lambda cache, length: False)
    made, rows = recorded(model, [PROMPTS[row % 3] for row in range(24)])
    assert len({len(row.ids) for row in made}) > 5
    assert rows[:2] == [3, 24] if selects else rows[:3] == [3, 24, 24]
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert (rows[-1] <= 12) == selects
    for row, together in enumerate(made):
        [alone], _ = recorded(model, [PROMPTS[row % 3]], seeds=[row])
        assert together.ids == alone.ids
        assert together.log_probs == pytest.approx(alone.log_probs, rel=1e-4)
        assert together.entropy == pytest.approx(alone.entropy, rel=1e-4)


def test_a_rank_computes_on_while_another_has_rows_to_finish(model: LlamaForCausalLM) -> None:
    alone, rows = recorded(model, PROMPTS)
    beside, of_another = recorded(model, PROMPTS, any_rank=lambda own: True)
    assert len(rows) < len(of_another) == 24
    assert [row.ids for row in beside] == [row.ids for row in alone]


def test_tokens_that_spell_no_spaces_are_refused_or_all_allowed() -> None:
    tokenizer = TextTokenizer(wordpiece(), "student")
    with pytest.raises(ConfigError, match="spells no spaces"):
        vocabulary_of(tokenizer, 7, width=16)
    found = any_token_of(tokenizer, 7, width=16)
    assert found.allowed.all() and len(found.allowed) == 16
    assert found.ends == {7}


def test_only_allowed_tokens_are_sampled_and_the_end_ends(model: LlamaForCausalLM) -> None:
    for row in sampler(model, temperature=5.0, max_new_tokens=60).complete(PROMPTS, [1, 2, 3], lambda: None):
        assert max(row.ids) <= END
        assert row.ends == row.finished == (END in row.ids)
        assert END not in row.ids[:-1]


def test_a_stop_string_ends_a_completion(model: LlamaForCausalLM) -> None:
    plain = sampler(model)
    tries = ((seed, plain.complete(PROMPTS[:1], [seed], lambda: None)[0].ids) for seed in range(100))
    seed, whole = next((seed, ids) for seed, ids in tries if len(ids) == 12 and END not in ids)
    text = b"".join(PIECES[token] for token in whole).decode()
    stop = text[2:4]
    [row] = sampler(model, stop=(stop,)).complete(PROMPTS[:1], [seed], lambda: None)
    assert row.stopped
    assert not row.ends
    assert row.ids == whole[: len(row.ids)]
    assert b"".join(PIECES[token] for token in row.ids).decode().index(stop) + 2 == len(row.ids)


@cases(
    "settings, expected",
    ({}, [0.5, 0.3, 0.15, 0.05]),
    ({"top_k": 2}, [0.625, 0.375, 0, 0]),
    ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),
    ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ids=["all", "top-k", "top-p", "temperature"],
)
def test_tokens_have_the_frequencies_of_the_distribution(settings: dict[str, Any], expected: list[float]) -> None:
    count = 4000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(count, 4)
    uniforms = torch.arange(count, dtype=torch.float64) / count
    chosen = choose(logits, uniforms, Sampling(1, **settings))
    found = torch.bincount(chosen, minlength=4) / count
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-3, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("width", [3, 256, 1000])
def test_a_choice_is_the_inverse_of_the_cumulative_distribution(width: int, settings: dict[str, Any]) -> None:
    """Tokens of probability 0 at both ends are never chosen, whatever rounding does."""
    generator = torch.Generator().manual_seed(width)
    logits = 3 * torch.randn(500, width, generator=generator)
    logits[:, [0, -1]] = -torch.inf
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    found = choose(logits, uniforms, Sampling(1, **settings))
    assert torch.isfinite(logits.gather(1, found.unsqueeze(1))).all()
    assert choose(torch.full_like(logits, torch.nan), uniforms, Sampling(1, **settings)).max() < width
    if not {"top_k", "top_p"} & settings.keys():
        exact = (logits.double() / settings.get("temperature", 1)).softmax(-1)
        after = exact.cumsum(-1).gather(1, found.unsqueeze(1)).squeeze(1)
        before = after - exact.gather(1, found.unsqueeze(1)).squeeze(1)
        assert ((before <= uniforms + 1e-6) & (uniforms <= after + 1e-6)).all()


@cases(
    "ids, expected",
    ([0, 11, 12, 1], (4, "aéb")),
    ([0, 11], (1, "a")),
    ([0, 11, 1, 2, 3, 4, 5, 6], (1, "a")),
    ([12, 0], (0, "")),
    ([], (0, "")),
    ids=["whole", "half-a-character", "invalid-early", "invalid-at-once", "empty"],
)
def test_a_completion_is_cut_before_bytes_that_are_no_text(ids: list[int], expected: tuple[int, str]) -> None:
    assert spelled_text(ids, PIECES) == expected


def test_prompts_of_each_kind_of_record() -> None:
    user, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    assert prompt_of({"text": "one two three"}, 9) == {"text": "one two"}
    assert prompt_of({"text": "one two"}, None) == {"text": "one two"}
    assert prompt_of({"prompt": "1+1=", "completion": "2"}, 2) == {"text": "1+1="}
    assert prompt_of({"messages": [user, answer]}, None) == {"messages": [user]}
    assert prompt_of({"messages": [answer]}, None) is None
