"""How a student is prepared: precision, recomputation, adapters, mixtures of experts, what its head is given as."""

import math
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.unit.trainer.students import FAMILIES, make_model, nll, settings, tokens
from xtoken_core.config.train import TrainSpec
from xtoken_core.errors import ConfigError
from xtoken_core.losses.lazy_logits import HeadProjection
from xtoken_services.trainer.metrics import flops_per_token
from xtoken_services.trainer.optimizer import StudentOptimizer
from xtoken_services.trainer.student import Student, check_head, decoder_layers

BF16 = {"dtype": "bfloat16"}


def gradients(student: Student, seeds: tuple[int, ...] = (0, 1)) -> dict[str, torch.Tensor]:
    """After one micro-batch per seed."""
    for seed in seeds:
        ids = tokens(seed)
        out = student.outputs(ids)
        nll(out.logits() if isinstance(out, HeadProjection) else out, ids).backward()
    return {name: weight.grad for name, weight in student.trainable.items() if weight.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", ["checkpoint_activations", "blockwise_head"])
def test_what_saves_memory_changes_no_gradient(family: str, change: str) -> None:
    plain = gradients(Student(make_model(family), settings()))
    other = gradients(Student(make_model(family), settings({change: True})))
    assert plain.keys() == other.keys()
    assert len(plain) == len(dict(make_model(family).named_parameters()))
    for name in plain:
        torch.testing.assert_close(other[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_master_weights_sum_gradients_and_steps_in_float32(family: str) -> None:
    student = Student(make_model(family), settings(BF16))
    assert {p.dtype for p in student.model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in student.trainable.values()} == {torch.float32}
    found = gradients(student)
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    assert all(p.grad is None for p in student.model.parameters())
    alone = [gradients(Student(make_model(family), settings(BF16)), (seed,)) for seed in (0, 1)]
    for name, grad in found.items():
        torch.testing.assert_close(grad, alone[0][name] + alone[1][name], rtol=0, atol=0)


def test_a_step_below_the_last_bit_is_kept_by_master_weights_and_lost_without() -> None:
    spec = TrainSpec(learning_rate=1e-6, grad_clip=None)
    moved = {}
    for master in (True, False):
        model = make_model() if master else make_model().to(torch.bfloat16)
        student = Student(model, settings(BF16, {"master_weights": master}))
        before = {name: weight.detach().clone() for name, weight in student.trainable.items()}
        optimizer = StudentOptimizer(student, spec, steps=10)
        gradients(student)
        optimizer.step(0)
        moved[master] = sum(
            int((before[n] != weight).sum()) for n, weight in student.trainable.items() if weight.ndim > 1
        )
    assert moved[True] > 20 * moved[False]


def test_the_model_computes_with_its_rounded_masters() -> None:
    student = Student(make_model(), settings(BF16))
    optimizer = StudentOptimizer(student, TrainSpec(learning_rate=0.1), steps=10)
    gradients(student)
    optimizer.step(0)
    own = dict(student.model.named_parameters())
    assert all(torch.equal(own[name], weight.to(torch.bfloat16)) for name, weight in student.trainable.items())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_restored_state_goes_on_bit_for_bit(name: str) -> None:
    def trained(optimizer: StudentOptimizer, steps: range) -> None:
        for step in steps:
            gradients(optimizer.student, (step,))
            optimizer.clip()
            optimizer.step(step)

    spec = TrainSpec.model_validate({"learning_rate": 0.01, "optimizer": name})
    students = [Student(make_model(), settings(BF16)) for _ in range(3)]
    whole, first, second = (StudentOptimizer(student, spec, steps=9, decays={1: 0.9}) for student in students)
    trained(whole, range(6))
    trained(first, range(3))
    kept = {name: value.clone() for name, value in first.state().items()}
    state = second.state()
    for name, value in state.items():
        value.copy_(kept[name])
    second.after_restore(state)
    trained(second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.state().values(), second.state().values(), strict=True))
    assert all(torch.equal(average, second.averages[1][name]) for name, average in whole.averages[1].items())


@pytest.mark.parametrize("precision", [BF16, None])
def test_the_average_of_the_weights_takes_their_place_for_a_while(precision: dict[str, str] | None) -> None:
    student = Student(make_model(), settings(precision))
    optimizer = StudentOptimizer(student, TrainSpec(learning_rate=0.1), steps=9, decays={1: 0.75})
    expected = {name: weight.detach().double() for name, weight in student.trainable.items()}
    for step in range(3):
        gradients(student, (step,))
        optimizer.step(step)
        expected = {name: 0.75 * old + 0.25 * student.trainable[name].detach() for name, old in expected.items()}
    own = {name: value.clone() for name, value in student.full_weights().items()}
    with optimizer.averaged(1):
        averages = {name: value.clone() for name, value in student.full_weights().items()}
    for name, value in averages.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-2 if precision else 1e-5, atol=1e-6)
        assert torch.equal(student.full_weights()[name], own[name]) and not torch.equal(value, own[name])


def test_adafactor_lowers_the_loss_with_less_state() -> None:
    spec = TrainSpec(learning_rate=0.1, optimizer="adafactor")
    student = Student(make_model(), settings(BF16))
    optimizer, batch, losses = StudentOptimizer(student, spec, steps=30), tokens(), []
    for step in range(30):
        loss = nll(student.outputs(batch), batch)
        loss.backward()
        losses.append(float(loss))
        optimizer.step(step)
    assert losses[-1] < 0.7 * losses[0]
    state = {key: value for key, value in optimizer.state().items() if key.startswith("optimizer.")}
    weights = sum(weight.numel() for weight in student.trainable.values())
    held = sum(value.nbytes for value in state.values()) / 4
    assert held < 0.3 * weights


@pytest.mark.slow
def test_compiled_layers_compute_the_same() -> None:
    plain, compiled = (Student(make_model(), settings({"compile": on})) for on in (False, True))
    assert all(layer._compiled_call_impl is not None for layer in decoder_layers(compiled.model))
    expected, found = gradients(plain, (0,)), gradients(compiled, (0,))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [0.01, 30.0], ids=["a cap that shows", "a cap that new weights do not reach"])
def test_a_head_with_more_behind_it_is_refused(cap: float) -> None:
    check_head(make_model().eval())
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=cap, initializer_range=0.02,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="blockwise_head"):
        Student(Gemma2ForCausalLM(config), settings({"blockwise_head": True}))


def test_an_adapter_on_a_head_that_is_multiplied_out_without_it_is_refused() -> None:
    pytest.importorskip("peft")
    lora = {"rank": 4, "targets": ["lm_head", "q_proj"]}
    Student(make_model(), settings(train={"lora": lora}))
    with pytest.raises(ConfigError, match=r"train\.lora\.targets names the head"):
        Student(make_model(), settings({"blockwise_head": True}, {"lora": lora}))


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_all_that_is_trained_and_merge_into_the_model(family: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    student = Student(make_model(family), settings({"dtype": dtype}, {"lora": lora}))
    assert {n.split(".")[-3] for n in student.trainable} == {"lora_A", "lora_B"}
    frozen = {n: p.detach().clone() for n, p in student.model.named_parameters() if "lora" not in n}
    optimizer = StudentOptimizer(student, TrainSpec(learning_rate=0.05), steps=5)
    before = student.outputs(tokens()).detach()
    for step in range(3):
        gradients(student)
        optimizer.step(step)
    after = student.outputs(tokens()).detach()
    assert not torch.allclose(after, before, atol=1e-2)
    assert all(torch.equal(p, frozen[n]) for n, p in student.model.named_parameters() if n in frozen)
    published = student.full_weights()
    whole = student.full_model(settings())
    whole[1].save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    merged = whole[1].merge_and_unload()
    assert set(merged.state_dict()) == set(make_model(family).state_dict())
    assert published.keys() == dict(merged.named_parameters()).keys()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(published[name], weight)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(merged(tokens()).logits, after, rtol=tolerance, atol=tolerance)


def test_adapters_for_layers_that_do_not_exist_are_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"nothing_such.* linear layers are q_proj, k_proj, v_proj, o_proj"):
        Student(make_model(), settings(train={"lora": {"targets": ["nothing_such"]}}))


def test_arithmetic_of_a_token_counts_only_what_it_meets() -> None:
    model = make_model(tie_word_embeddings=False)
    every = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    assert flops_per_token(Student(model, settings())) == 6 * (every - embedding)
    tied = make_model(tie_word_embeddings=True)
    assert flops_per_token(Student(tied, settings())) == 6 * sum(p.numel() for p in tied.parameters())
    mixture = make_model("mixtral")
    experts = sum(p.numel() for n, p in mixture.named_parameters() if ".experts." in n)
    rest = sum(p.numel() for n, p in mixture.named_parameters() if ".experts." not in n)
    rest -= mixture.get_input_embeddings().weight.numel()
    assert math.isclose(flops_per_token(Student(mixture, settings())), 6 * (rest + experts / 2))
