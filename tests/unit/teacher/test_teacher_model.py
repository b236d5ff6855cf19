"""The teacher from tokens to a slot: the head apart, column maxima, buckets, 8-bit weights, its budget."""

import copy
import dataclasses
import logging

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.ops.tolerances import OUTPUT, assert_within
from xtoken_core.errors import ConfigError
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.packing import PackedRow
from xtoken_core.topk_logits import largest_logits, read_topk
from xtoken_core.transports import RingShape
from xtoken_core.transports.ring import TopKSettings
from xtoken_services.common.models.packed_attention import NAME
from xtoken_services.common.run.memory_estimate import check_teacher, weight_bytes
from xtoken_services.teacher import prepare as teacher_model
from xtoken_services.teacher.base import TeacherBatch
from xtoken_services.teacher.prepare import Fp8Linear, TeacherModel, check_fp8, head_is_plain
from xtoken_services.teacher.quantized import swap_linears

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 131


def llama(device="cpu", dtype=torch.float32, hidden=32, tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WIDTH, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, dtype).eval()


def gemma():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=WIDTH, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, final_logit_softcapping=30.0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).eval()


def tokens(rows, width):
    return torch.randint(WIDTH, (rows, width), generator=torch.Generator().manual_seed(3))


def logits_of(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids.to(model.device), use_cache=False).logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_the_head_is_in_memory_once_while_it_is_lent(device, tied):
    model, ids = llama(device, tied=tied), tokens(3, 17)
    teacher = TeacherModel(model)
    expected, kept = logits_of(model, ids), teacher.head.clone()
    for _ in range(2):
        memory = torch.zeros_like(kept)
        with teacher.head_in(memory):
            assert teacher.head.data_ptr() == memory.data_ptr()
            assert (model.get_input_embeddings().weight.data_ptr() == memory.data_ptr()) is tied
            with torch.inference_mode():
                logits = model(input_ids=ids.to(device), use_cache=False).logits
                torch.testing.assert_close(logits, expected)
        memory.zero_()
        assert torch.equal(teacher.head.to(device), kept)
        assert teacher.device.type == device


def test_a_head_that_must_be_another_is_copied():
    teacher = TeacherModel(llama())
    kept = teacher.head
    memory = torch.zeros_like(kept, dtype=torch.float64)
    with teacher.head_in(memory):
        assert teacher.head.data_ptr() == kept.data_ptr() != memory.data_ptr()
        assert torch.equal(memory.float(), kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_logits_are_written_into_the_slot(device, dtype, tied):
    model, ids = llama(device, dtype, tied=tied), tokens(3, 17)
    teacher = TeacherModel(model)
    assert teacher.plain_head and teacher.device.type == device
    out = torch.full((3, 17, WIDTH), torch.nan, device=device, dtype=dtype)
    teacher.write_logits(ids, out)
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(out, logits_of(model, ids), **tight)
    elsewhere = torch.full((3, 17, WIDTH), torch.nan, dtype=torch.float64)
    teacher.write_logits(ids, elsewhere)
    torch.testing.assert_close(elsewhere, out.cpu().double(), **tight)


def test_what_happens_to_logits_after_the_head_is_noticed():
    assert head_is_plain(llama())
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=WIDTH, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()
    assert head_is_plain(gpt)
    capped, ids = gemma(), tokens(2, 9)
    assert not head_is_plain(capped)
    biased = llama()
    biased.lm_head = torch.nn.Linear(32, WIDTH)
    assert not head_is_plain(biased)
    out = torch.full((2, 9, WIDTH), torch.nan)
    TeacherModel(capped).write_logits(ids, out)
    torch.testing.assert_close(out, logits_of(capped, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_logits_that_must_be_copied_are_told_of_once(caplog, monkeypatch, compiled):
    monkeypatch.setattr(teacher_model, "compile_layers", lambda body: None)
    monkeypatch.setattr(logging.getLogger("xtoken"), "propagate", True)
    out = torch.empty(2, 9, WIDTH)
    teacher = TeacherModel(gemma(), compiled=compiled)
    for _ in range(3):
        teacher.write_logits(tokens(2, 9), out)
    (told,) = caplog.messages
    assert told.startswith("this teacher's logits are not just hidden states times head")
    assert ("widths are not rounded up" in told) == compiled
    TeacherModel(llama()).write_logits(tokens(2, 9), out)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (2, 40), (3, 64)])
def test_hidden_states_come_with_each_rows_column_maxima(monkeypatch, device, dtype, rows, width):
    monkeypatch.setattr(teacher_model, "CHUNK_TOKENS", 16)
    model, ids, vocab = llama(device, dtype), tokens(rows, width), 100
    teacher = TeacherModel(model)
    hidden = torch.full((rows, width, 32), torch.nan, device=device, dtype=dtype)
    maxima = torch.full((rows, vocab), torch.nan, device=device, dtype=dtype)
    teacher.write_hidden(ids, hidden, maxima)
    logits = logits_of(model, ids)
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(hidden @ teacher.head.t(), logits, **tight)
    torch.testing.assert_close(maxima, logits[..., :vocab].amax(1), **tight)
    teacher.write_hidden(ids, hidden, None)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_packed_row_is_written_as_its_samples_alone(monkeypatch, compiled):
    monkeypatch.setattr(teacher_model, "compile_layers", lambda body: None)
    model = llama()
    model.set_attn_implementation(NAME)
    teacher, row = TeacherModel(model, compiled=compiled, longest=16), PackedRow((9, 3, 14), 32)
    ids = tokens(1, 32)
    alone = [logits_of(model, ids[:, part]) for part in row.slices()]
    out, hidden, maxima = torch.empty(1, 32, WIDTH), torch.empty(1, 32, 32), torch.empty(1, 100)
    teacher.write_logits(ids, out, row)
    teacher.write_hidden(ids, hidden, maxima, row)
    bound = OUTPUT["chunk", torch.float32]
    for part, expected in zip(row.slices(), alone, strict=True):
        assert_within(out[:, part], expected, bound, "logits")
        assert_within(hidden[:, part] @ teacher.head.t(), expected, bound, "hidden states")
    assert_within(maxima, out[..., :100].amax(1), bound, "maxima")


def test_a_bucket_changes_no_valid_position(monkeypatch):
    teacher, ids = TeacherModel(llama()), tokens(3, 17)
    plain = teacher.hidden(ids)
    teacher.compiled = True
    monkeypatch.setattr(teacher_model, "WIDTH_BUCKET", 32)
    seen = []
    body = teacher._body
    teacher._body = lambda input_ids, use_cache: seen.append(input_ids.shape) or body(input_ids, use_cache=use_cache)
    torch.testing.assert_close(teacher.hidden(ids), plain, rtol=1e-5, atol=1e-5)
    assert teacher.hidden(tokens(1, 250)).shape == (1, 250, 32)
    assert seen == [(3, 32), (1, 256)]


def test_fp8_is_refused_where_it_cannot_run():
    with pytest.raises(ConfigError, match="teacher 0: fp8 needs a GPU, and this teacher is on the CPU"):
        check_fp8(torch.device("cpu"), "bfloat16", "teacher 0")


def test_weights_are_counted_from_their_headers(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    values = sum(parameter.numel() for parameter in model.parameters())
    assert weight_bytes(tmp_path, "bfloat16") == 2 * values
    assert weight_bytes(tmp_path, "float32") == 4 * values


# On a GPU


@pytest.mark.gpu
def test_a_teacher_that_cannot_fit_is_refused_in_one_line():
    shape = RingShape(slots=2, slot_tokens=8192, head_width=151936, vocab=151936, dtype="bfloat16")
    check_teacher(torch.device("cuda", 0), 1 << 30, shape, "teacher 0", ring_on_device=True)
    huge = dataclasses.replace(shape, slots=64)
    with pytest.raises(
        ConfigError, match=r"the free memory of cuda:0 has .* \(teacher 0's weights 1\.00, its signal's 64 slots "
    ) as found:
        check_teacher(torch.device("cuda", 0), 1 << 30, huge, "teacher 0", ring_on_device=True)
    assert "\n" not in str(found.value)
    check_teacher(torch.device("cuda", 0), 1 << 30, huge, "teacher 0", ring_on_device=False)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [(1,), (3, 5), (4, 64)], ids=str)
def test_a_layer_in_8_bits_is_close_to_the_layer(rows, bias):
    check_fp8(torch.device("cuda", 0), "bfloat16", "teacher 0")
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 128, bias=bias, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(*rows, 256, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = torch.nn.functional.linear(x.double(), layer.weight.double(), None if not bias else layer.bias.double())
        found = Fp8Linear(layer)(x)
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert (found.double() - exact).norm() / exact.norm() < 0.04


@pytest.mark.gpu
def test_layers_are_swapped_and_the_head_is_not():
    model = llama("cuda", torch.bfloat16, hidden=64)
    ids = tokens(4, 48)
    expected = logits_of(model, ids).double()
    assert swap_linears(model.base_model, Fp8Linear) == 2 * 7
    assert type(model.lm_head) is torch.nn.Linear
    with pytest.raises(ConfigError, match="bfloat16"):
        check_fp8(torch.device("cuda", 0), "float32", "teacher 0")
    found = logits_of(model, ids).double()
    assert 0 < (found - expected).norm() / expected.norm() < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_compiled_teacher_gives_the_same_whatever_the_shape(fp8):
    model = llama("cuda", torch.bfloat16, hidden=64)
    if fp8:
        swap_linears(model.base_model, Fp8Linear)
    eager, compiled = TeacherModel(model), TeacherModel(copy.deepcopy(model), compiled=True)
    for rows, width in ((4, 64), (2, 128), (1, 200), (7, 24)):
        ids = tokens(rows, width)
        found, expected = compiled.hidden(ids).double(), eager.hidden(ids).double()
        assert (found - expected).norm() / expected.norm() < (0.05 if fp8 else 0.02)


# Largest logits


@pytest.mark.parametrize("make", [llama, gemma], ids=["plain head", "capped logits"])
def test_the_largest_logits_of_every_position_are_written(make, monkeypatch):
    monkeypatch.setattr(teacher_model, "CHUNK_TOKENS", 16)
    model, ids = make(), tokens(3, 17)
    settings = TopKSettings(8, WIDTH - 3, 2.0)
    out = torch.full((3, 17, settings.width), torch.nan)
    TeacherModel(model).write_topk(ids, out, settings)
    expected = largest_logits(logits_of(model, ids), predicted_ids(ids), settings)
    found = read_topk(out, settings)
    assert torch.equal(found.ids, expected.ids)
    for name in ("values", "log_z", "log_z_scaled", "log_rest", "own"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


# Completions


@pytest.mark.parametrize(
    ("make", "content"), [(llama, "logits"), (llama, "hidden"), (llama, "topk"), (gemma, "logits"), (gemma, "topk")]
)
@pytest.mark.parametrize("packed", [False, True])
def test_completions_are_at_a_temperature_of_their_own(make, content, packed):
    if packed and make is gemma:
        pytest.skip("a model that caps its attention takes no packed rows")
    model, settings = make(), TopKSettings(8, WIDTH, 1.0)
    ids, row, lengths = tokens(2, 16), None, (16, 11)
    if packed:
        model.set_attn_implementation(NAME)
        ids, row, lengths = tokens(1, 32), PackedRow((9, 14), 32), (9, 14)
    batch = TeacherBatch((6, 7), ids, row, lengths, (), completions={7})
    topk = settings if content == "topk" else None
    teacher = TeacherModel(model, longest=16, content=content, topk=topk, of_completions=0.5)
    width = {"logits": WIDTH, "hidden": 32, "topk": settings.width}[content]
    sharp, plain = torch.empty(*ids.shape, width), torch.empty(*ids.shape, width)
    teacher.write(batch, sharp)
    teacher.write(dataclasses.replace(batch, completions=()), plain)
    for sample, part in enumerate(batch.parts()):
        if content == "topk":
            found, was = read_topk(sharp, settings), read_topk(plain, settings)
            logits = was.values[part] * (1 + sample)
            torch.testing.assert_close(found.values[part], logits, rtol=1e-5, atol=1e-5)
            assert (found.log_probs()[part][:, 0] > was.log_probs()[part][:, 0]).all() == bool(sample)
        else:
            torch.testing.assert_close(sharp[part], plain[part] * (1 + sample), rtol=1e-5, atol=1e-5)


def test_whole_logits_of_completions_exist_once():
    teacher, logits = TeacherModel(gemma(), of_completions=0.7), torch.randn(2, 3, WIDTH).bfloat16()
    expected = (logits.float() * torch.tensor([1.0, 1 / 0.7]).view(2, 1, 1)).bfloat16()
    assert teacher._sharpened(logits, [(1, slice(0, 3))]) is logits
    torch.testing.assert_close(logits, expected)
