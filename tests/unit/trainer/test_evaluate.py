"""Held-out text during a run: it says that it goes on, it may be left, and it keeps a head in blocks."""

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.ops.tolerances import OUTPUT
from tests.support.ranks import start_ranks
from tests.support.runs import resolved_run
from tests.unit.core.test_evaluation import adding_tokenizer, byte_tokenizer, llama
from tests.unit.trainer.students import settings
from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.evaluation import evaluate
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher
from xtoken_core.losses.lazy_logits import Logits
from xtoken_core.packing import PackedRow
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.models.packed_attention import NAME
from xtoken_services.common.processes.worker import StopRequested
from xtoken_services.trainer import eval_loss as module
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.eval_loss import EvalLoss
from xtoken_services.trainer.evaluate import all_cores
from xtoken_services.trainer.student import Student

READ: dict[str, Any] = {"context_length": 8, "batch_tokens": 16, "device": "cpu", "max_bytes": 10**6}
TEXTS = ["0123456789" * 5, "def f(x):\n    return x"]

WAITING = """
import sys, time
from datetime import timedelta
from xtoken_services.trainer import distributed as module
module.MEETING, module.BEAT = timedelta(seconds=10), timedelta(seconds=0.1)
group, beats = module.RankGroup.of_environment(), []
for pg in (module.dist.group.WORLD, group.background):
    assert pg._get_backend(module.torch.device("cpu")).options._timeout == module.TIMEOUT
group.beat = lambda: beats.append(1)
if group.is_leader:
    if sys.argv[1] == "dies":
        sys.exit(9)
    time.sleep(1.5)
group.barrier()
assert group.is_leader or len(beats) > 3, beats
print(group.broadcast(7))
group.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank_0", ["evaluates", "dies"])
def test_a_rank_that_waits_beats_and_notices_a_death_at_once(rank_0: str) -> None:
    processes = start_ranks([sys.executable, "-c", WAITING, rank_0], 2)
    try:
        said = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if rank_0 == "evaluates":
        assert [out.strip() for out, _ in said] == ["7", "7"], said
    else:
        assert [process.returncode for process in processes] == [9, 1]
        assert "Connection" in said[1][1]


def test_names_of_more_texts() -> None:
    spec = EvalSpec(path=Path("a.jsonl"), also=(Path("x/test.jsonl"), Path("x/hand book.de.jsonl")))
    assert list(spec.also_by_name) == ["test", "hand_book.de"]
    assert EvalSpec(path=Path("a.jsonl"), also=Path("b.jsonl")).also_by_name == {"b": Path("b.jsonl")}
    assert EvalSpec(path=Path("a.jsonl")).also_by_name == {}


def test_more_texts_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"eval\.also: two texts have the same file name"):
        EvalSpec(path=Path("a.jsonl"), also=(Path("x/test.jsonl"), Path("y/test.txt")))


def test_a_single_rank_waits_for_nobody() -> None:
    group = RankGroup(0, 1)
    group.barrier()
    assert group.broadcast(3) == 3


def test_an_evaluation_goes_on_batch_by_batch_and_may_be_left_between_them() -> None:
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    model, calls = llama(259).train(), list[int]()
    forward = model.register_forward_pre_hook(lambda *_: calls.append(0))
    evaluate(model, tokenizer, TEXTS, **READ, progress=lambda: calls.append(1))
    forward.remove()
    # Two texts are tokenized; then 7 windows of 8 tokens and 2 shorter ones, two at a time.
    assert calls == [1, 1, *[0, 1] * 5]

    def leave() -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        evaluate(model, tokenizer, TEXTS, **READ, progress=leave)
    assert model.training


def test_a_blockwise_student_is_read_without_its_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    spec = settings({"blockwise_head": True, "dtype": "float32"})
    student = Student(llama(320), spec)
    expected = evaluate(student, tokenizer, TEXTS, **READ)
    monkeypatch.setattr(student.model.lm_head, "forward", None)  # whoever multiplies it out as a whole fails
    found = evaluate(student, tokenizer, TEXTS, **READ, outputs=student.outputs)
    assert found.nll_nats == pytest.approx(expected.nll_nats, rel=1e-5)
    assert (found.tokens, found.next_token_accuracy) == (expected.tokens, expected.next_token_accuracy)
    torch.testing.assert_close(found.bits_per_byte, expected.bits_per_byte, rtol=1e-5, atol=0)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("blockwise", [False, True])
def test_packed_windows_are_read_as_padded_ones(blockwise: bool, adds: bool) -> None:
    tokenizer = (
        adding_tokenizer("<bos>") if adds else byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    )
    model = llama(320)
    model.set_attn_implementation(NAME)
    student, calls = Student(model, settings({"blockwise_head": blockwise, "dtype": "float32"})), list[int]()

    def outputs(ids: torch.Tensor, row: PackedRow) -> Logits:
        calls.append(ids.shape[1])
        return student.outputs(ids, row)

    expected = evaluate(student, tokenizer, TEXTS, **READ)
    found = evaluate(student, tokenizer, TEXTS, **READ, packed_outputs=outputs)
    assert found.nll_nats == pytest.approx(expected.nll_nats, rel=OUTPUT["chunk", torch.float32][0])
    assert (found.tokens, found.next_token_accuracy) == (expected.tokens, expected.next_token_accuracy)
    again = sum((len(text) - 2) // (READ["context_length"] - 1) for text in TEXTS)  # windows behind the first ones
    assert sum(calls) == found.tokens + (again if adds else 0) and max(calls) <= READ["batch_tokens"]


def held_out_spec(directory: Path, *, teachers: int = 1, loss: dict[str, Any] | None = None, **student: Any) -> RunSpec:
    """A run whose teachers, all alike, share the student's tokenizer, and are there."""
    teacher = directory / "teacher"
    llama(259).save_pretrained(teacher)
    raw = resolved_run(directory).spec.model_dump()
    return RunSpec.model_validate(
        raw
        | {
            "student": raw["student"] | student,
            "teacher": [{"model": teacher, "context_length": 64}] * teachers,
            "eval": {"path": directory / "text.jsonl", "teacher_kl": True},
            "loss": loss or {},
        }
    )


def held_out_loss(spec: RunSpec, device: str = "cpu", *, packed: bool = False, **options: Any) -> EvalLoss:
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    teachers = [LossTeacher(259, None, None, 1.0) for _ in spec.teacher]
    loss = CrossTokenizerDistillationLoss(
        spec.loss, student_vocab_size=259, teachers=teachers, device=torch.device(device)
    )
    side = ResolvedModel(vocab_size=259, head_width=259, tokenizer_fingerprint="s")
    run = ResolvedRun(
        spec=spec, student=side, teachers=(side,) * len(spec.teacher), data_fingerprint="", records=1, positions=1,
        projection_fingerprints=("",) * len(spec.teacher), packed=packed,
    )  # fmt: skip
    return EvalLoss(run, loss, tokenizer, TEXTS * 3, **options)


def test_the_held_out_loss_goes_on_batch_by_batch_and_is_the_same_blockwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, calls = [], list[int]()
    for blockwise in (False, True):
        spec = held_out_spec(tmp_path, blockwise_head=blockwise)
        student = Student(llama(320), spec).eval()
        if blockwise:
            monkeypatch.setattr(student.model.lm_head, "forward", None)
        held_out = held_out_loss(spec, progress=lambda: calls.append(0))
        found.append(held_out.measure(student, 1.0, progress=lambda: calls.append(1)))
    batches = len(held_out.batches)
    assert calls == 2 * [*[0] * (1 + batches), *[1] * (1 + batches)] and batches > 1
    assert found[0].keys() == found[1].keys()
    assert list(found[1].values()) == pytest.approx(list(found[0].values()), rel=0.02)


@pytest.mark.parametrize("aggregation", ["sum", "select_teacher"])
def test_the_held_out_loss_is_the_same_packed(tmp_path: Path, aggregation: str) -> None:
    loss = {"teacher_aggregation": aggregation, "vocab_topk": None}
    spec = held_out_spec(tmp_path, teachers=2, loss=loss)
    model = llama(320)
    model.set_attn_implementation(NAME)
    student, found = Student(model, spec).eval(), []
    for packed in (False, True):
        held_out = held_out_loss(spec, packed=packed)
        assert len(held_out.batches) > 1
        found.append(held_out.measure(student, 1.0))
    assert found[1] == pytest.approx(found[0], rel=OUTPUT["chunk", torch.float32][0], abs=1e-7)


def test_the_held_out_loss_of_the_teachers_that_are_followed_is_a_mean_over_all_documents(tmp_path: Path) -> None:
    found = []
    for teachers, loss in ((1, {}), (2, {"teacher_aggregation": "select_teacher"})):
        spec = held_out_spec(tmp_path, teachers=teachers, loss=loss)
        held_out, student = held_out_loss(spec), Student(llama(320), spec).eval()
        found.append(held_out.measure(student, 1.0))
        assert len(held_out.batches) > 1 and held_out.measure(student, 1.0) == found[-1], "nothing is counted twice"
    assert found[1]["held_out_kl_loss"] == pytest.approx(found[0]["held_out_kl_loss"], rel=1e-5)


def test_the_held_out_loss_weighs_the_divergence_as_the_step_does(tmp_path: Path) -> None:
    spec = held_out_spec(tmp_path, loss={"mode": "p_kl"})
    held_out, student = held_out_loss(spec), Student(llama(320), spec).eval()
    for weight in (2.0, 1.0, 0.0):
        row = held_out.measure(student, weight)
        expected = weight * row["held_out_kl_loss"] + spec.loss.ce_loss_scale * row["held_out_ce_loss"]
        assert row["held_out_kl_loss_scale"] == weight and row["held_out_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_teachers_are_gone_when_the_held_out_loss_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    loaded: list[weakref.ref[PreTrainedModel]] = []

    def load(*args: Any, **options: Any) -> PreTrainedModel:
        model = load_model(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(module, "load_model", load)
    spec = held_out_spec(tmp_path, teachers=2)
    student, held_out = Student(llama(320).to(device), spec).eval(), held_out_loss(spec, device)
    kept = []
    for _ in range(2):
        held_out.measure(student, 1.0)
        kept.append(torch.cuda.memory_reserved() if device == "cuda" else 0)
    assert len(loaded) == 4 and all(model() is None for model in loaded)
    if device == "cuda":
        student.model(torch.zeros(1, 8, dtype=torch.int64, device=device))
        big = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        del big
        held_out.measure(student, 1.0)
        assert torch.cuda.memory_reserved() <= max(kept) < 1 << 28, "what is not used goes back to the GPU"


def test_cores_of_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    before, cpu = torch.get_num_threads(), torch.device("cpu")

    def during(own: int, teachers: int, **workers: int) -> int:
        torch.set_num_threads(own)
        with all_cores(resolved_run(tmp_path, teachers=teachers, **workers), cpu):
            inside = torch.get_num_threads()
        assert torch.get_num_threads() == own
        return inside

    try:
        assert (during(2, 1), during(1, 2), during(3, 1), during(2, 1, ranks=2)) == (4, 4, 3, 2)
    finally:
        torch.set_num_threads(before)
