"""Bits per byte of held-out text."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.examples import examples
from tests.support.vocabularies import unigram
from xtoken_core.errors import InputError
from xtoken_core.evaluation import answer_windows, cut_windows, evaluate, nll_and_hits
from xtoken_core.uncertainty import GROUPS, grouped

TEXTS = ["def f(x):\n    return x + 1\n", "é", "", "日本語のテキスト and more of it 🙂" * 3, "a"]


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, and the special tokens asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def adding_tokenizer(*tokens: str) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte; these tokens are put before every text, as Gemma's does with its BOS."""
    tokenizer = byte_tokenizer(bos_token=tokens[-1], eos_token="</s>", pad_token="<pad>")
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{' '.join(tokens)} $A", special_tokens=list(zip(tokens, ids, strict=True))
    )
    assert tokenizer("a")["input_ids"][:-1] == ids
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def evaluated(model: Any, tokenizer: Any, texts: Any, context: int, batch_tokens: int = 8, max_bytes: int = 99) -> Any:
    sizes = {"context_length": context, "batch_tokens": batch_tokens, "max_bytes": max_bytes}
    return evaluate(model, tokenizer, texts, device="cpu", **sizes)


def llama(head: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=head,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.5,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config)


def brute_force(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, context: int, added: int = 0
) -> float:
    """Predict one token at a time, each from the tokens before it in its own window.

    Every window begins with the `added` tokens that the tokenizer puts before a text.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"][:added]
    before = [*(special[-1:] or [tokenizer.bos_token_id]), *ids]
    total = 0.0
    begin = 0
    for i, token in enumerate(ids):
        lead = special[: added if begin else added - 1] if added else []
        if len(lead) + i - begin == context:
            begin, lead = i, special
        window = [*lead, *before[begin : i + 1]]
        assert len(window) <= context
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([window])).logits[0, -1, : len(tokenizer)]
        total -= torch.log_softmax(logits.double(), dim=-1)[token].item()
    return total


@pytest.mark.parametrize("head", [259, 320], ids=["exact-head", "wide-head"])
@pytest.mark.parametrize("context", [1, 7, 500])
def test_every_token_counts_once(tokenizer: PreTrainedTokenizerFast, head: int, context: int) -> None:
    model = llama(head).train()
    result = evaluated(model, tokenizer, TEXTS, context, 64, 10**6)
    assert model.training
    model.eval()
    expected = sum(brute_force(model, tokenizer, text, context) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    assert result.nll_nats == pytest.approx(expected, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(expected / math.log(2) / size, rel=1e-5)
    assert (result.bytes, result.tokens, result.documents) == (size, size, 4)
    each = [text for text in TEXTS if text]
    assert result.group_bytes == [len(text.encode()) for text in each]
    assert result.group_nats == pytest.approx([brute_force(model, tokenizer, text, context) for text in each], abs=1e-3)


def test_the_standard_error_is_that_of_a_mean_over_documents_of_one_size(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["abcd", "bcde", "zzzz", "0123", "a  b"]
    result = evaluated(llama(259), tokenizer, texts, 7)
    bits = torch.tensor(result.group_nats, dtype=torch.float64) / math.log(2) / 4
    assert result.standard_error == pytest.approx(bits.std().item() / math.sqrt(5), rel=1e-3) and bits.std() > 0.01
    assert evaluated(llama(259), tokenizer, texts[:1], 7).standard_error is None


def test_documents_beyond_the_groups_are_added_to_them() -> None:
    values = [float(value) for value in range(2 * GROUPS + 1)]
    found = grouped(values)
    assert len(found) == GROUPS and sum(found) == sum(values)
    assert found[:2] == [0 + GROUPS + 2 * GROUPS, 1 + GROUPS + 1]


@pytest.mark.parametrize("added", [1, 2])
@pytest.mark.parametrize("context", [3, 7, 500])
def test_every_window_begins_with_what_the_tokenizer_puts_before_a_text(added: int, context: int) -> None:
    tokenizer, model = adding_tokenizer(*["<mask>", "<bos>"][-added:]), llama(300).eval()
    result = evaluated(model, tokenizer, TEXTS, context, 64, 10**6)
    expected = sum(brute_force(model, tokenizer, text, context, added) for text in TEXTS)
    assert result.nll_nats == pytest.approx(expected, rel=1e-5)
    assert result.tokens == result.bytes == sum(len(text.encode()) for text in TEXTS)


def test_a_context_that_only_what_is_put_before_a_text_fills_is_refused_in_one_line() -> None:
    settings = {"batch_tokens": 8, "device": "cpu", "max_bytes": 99}
    with pytest.raises(InputError, match=r"context_length = 1 is too short .* at least 2 tokens") as refused:
        evaluate(Uniform(300), adding_tokenizer("<bos>"), ["ab"], context_length=1, **settings)
    assert "\n" not in str(refused.value)
    assert evaluate(Uniform(300), adding_tokenizer("<bos>"), ["ab"], context_length=2, **settings).tokens == 2


def test_batches_change_nothing_but_rounding_and_repetition_nothing_at_all(tokenizer: PreTrainedTokenizerFast) -> None:
    model = llama(259)

    def nll(batch_tokens: int) -> float:
        return evaluated(model, tokenizer, TEXTS, 16, batch_tokens, 10**6).nll_nats

    assert nll(64) == nll(64)
    assert nll(1) == pytest.approx(nll(4096), rel=1e-5)


class Uniform(nn.Module):
    """Gives every token the same logit, but token `favourite` a little more."""

    def __init__(self, head: int, favourite: int | None = None) -> None:
        super().__init__()
        self.head, self.favourite = head, favourite

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, self.head)
        if self.favourite is not None:
            logits[..., self.favourite] = 1e-6
        return SimpleNamespace(logits=logits)


def test_accuracy_is_the_share_of_tokens_with_the_highest_logit(tokenizer: PreTrainedTokenizerFast) -> None:
    (favourite,) = tokenizer("a")["input_ids"]
    result = evaluated(Uniform(259, favourite), tokenizer, ["abca"], 3)
    assert result.next_token_accuracy == 0.5


@pytest.mark.parametrize(("max_bytes", "documents"), [(1, 1), (10, 1), (11, 2), (15, 2), (16, 3), (99, 3)])
def test_reading_stops_before_the_document_that_does_not_fit(
    tokenizer: PreTrainedTokenizerFast, max_bytes: int, documents: int
) -> None:
    texts = ["0123456789", "x", "", "01234"]
    result = evaluated(Uniform(259), tokenizer, texts, 8, max_bytes=max_bytes)
    assert result.documents == documents


def test_eos_stands_in_for_a_missing_bos() -> None:
    only_eos = byte_tokenizer(eos_token="</s>")
    model = llama(257).eval()
    result = evaluated(model, only_eos, ["ab"], 8)
    ids = [only_eos.eos_token_id, *only_eos("ab")["input_ids"]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:2]])).logits[0]
    expected = nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
    assert result.nll_nats == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_evaluated_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    settings = {"context_length": 8, "batch_tokens": 8, "device": "cpu", "max_bytes": 99}
    with pytest.raises(InputError, match="no held-out text"):
        evaluate(Uniform(259), tokenizer, ["", ""], **settings)
    with pytest.raises(InputError, match="head has 258 rows, its tokenizer 259 tokens"):
        evaluate(Uniform(258), tokenizer, ["a"], **settings)
    with pytest.raises(InputError, match="neither a BOS nor an EOS"):
        evaluate(Uniform(259), byte_tokenizer(), ["a"], **settings)
    with pytest.raises(InputError, match="the model's tokenizer has no token for 'Ω'"):
        evaluate(Uniform(500), unigram(byte_fallback=False, unknown=False), ["hello Ω"], **settings)


@examples(25, 100)
@given(ids=st.lists(st.integers(0, 99), max_size=40), context=st.integers(1, 45))
def test_windows_predict_each_token_from_the_one_before(ids: list[int], context: int) -> None:
    windows = cut_windows(ids, start=[-1], again=[], context_length=context)
    assert [t for w in windows for t in w.targets] == ids
    assert [i for w in windows for i in w.inputs] == [-1, *ids][: len(ids)]
    assert all(len(w.inputs) == len(w.targets) <= context for w in windows)


@examples(25, 100)
@given(ids=st.lists(st.integers(0, 99), max_size=40), added=st.integers(1, 2), room=st.integers(1, 45))
def test_windows_repeat_what_begins_a_text(ids: list[int], added: int, room: int) -> None:
    special, context = list(range(-added, 0)), added + room
    windows = cut_windows(ids, start=special, again=special, context_length=context)
    assert [t for w in windows for t in w.targets] == ids
    before: list[int] = []
    for number, window in enumerate(windows):
        assert window.inputs == [*special, *before, *window.targets[:-1]]
        assert len(window.inputs) == context or (number == len(windows) - 1 and len(window.inputs) < context)
        before = window.targets[-1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_rows_are_scored_in_pieces_without_loss(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 1000, 11).to(dtype), torch.randint(0, 11, (3, 1000))
    mask = torch.rand(3, 1000) < 0.7
    before = logits.clone()
    nll, hits = nll_and_hits(logits, targets, mask)
    each = nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(nll, torch.where(mask.flatten(), each, 0.0), rtol=1e-5, atol=1e-5)
    assert hits.item() == ((logits.argmax(-1) == targets) & mask).sum().item()
    assert torch.equal(logits, before)


def record_nll(model: LlamaForCausalLM, ids: list[int], learn: list[int], context: int) -> float:
    """Predict each learnt token of a record that fits the context from all tokens before it."""
    assert len(ids) <= context
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :, :].double().log_softmax(-1)
    return -sum(logits[at - 1, ids[at]].item() for at in range(1, len(ids)) if learn[at])


def test_of_records_only_the_answers_are_scored(tokenizer: PreTrainedTokenizerFast) -> None:
    model = llama(len(tokenizer)).eval()
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    tokenizer.chat_template = template + "{% if add_generation_prompt %}[assistant]{% endif %}"
    talk = [("user", "2 + 2?"), ("assistant", "4, é"), ("user", "and 3?"), ("assistant", "It is 7.")]
    records = [
        {"prompt": "Say é: ", "completion": "é!"},
        {"prompt": "", "completion": "bare"},
        {"messages": [{"role": role, "content": content} for role, content in talk]},
        {"messages": [{"role": "user", "content": "no answer"}]},
        "a text",
    ]
    result = evaluated(model, tokenizer, records, 80, 128, 10**6)
    parts = [
        [("Say é: ", 0), ("é!", 1)],
        [("<s>", 0), ("bare", 1)],
        [part for role, said in talk for part in ((f"[{role}]", 0), (said, int(role == "assistant")), ("\n", 0))],
        [("<s>", 0), ("a text", 1)],
    ]
    expected = 0.0
    for record in parts:
        rows = [
            (token, learn) for text, learn in record for token in tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        expected += record_nll(model, [token for token, _ in rows], [learn for _, learn in rows], 80)
    scored = sum(len(text.encode()) for record in parts for text, learn in record if learn)
    assert result.nll_nats == pytest.approx(expected, rel=1e-5)
    assert (result.bytes, result.tokens, result.documents) == (scored, scored, 4)


@examples(50, 200)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 12))
def test_windows_of_answers_have_every_learnt_token_once(learn: list[int], context: int) -> None:
    learn = [0, *learn]
    ids = list(range(len(learn)))  # every token is its own position
    windows = answer_windows(ids, learn, context)
    assert [target for window in windows for target in window.targets] == [at for at in ids if learn[at]]
    for window in windows:
        first = window.targets[0] - (len(window.inputs) - len(window.targets)) - 1
        assert window.inputs == list(range(first, window.targets[-1]))
        assert len(window.inputs) <= context
        assert first == 0 or len(window.skipped) + 1 >= context // 2
