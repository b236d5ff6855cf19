"""Held-out text during a run: it says that it goes on, it may be left, and it keeps a head in blocks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.tolerances import OUTPUT
from tests.support.ranks import start_ranks
from tests.support.runs import resolved_run
from tests.unit.core.test_evaluation import adding_tokenizer, byte_tokenizer, llama
from tests.unit.trainer.students import settings
from xtoken_core.config.eval import EvalSpec
from xtoken_core.evaluation import evaluate
from xtoken_core.losses.lazy_logits import Logits
from xtoken_core.packing import PackedRow
from xtoken_services.common.models.packed_attention import NAME
from xtoken_services.common.processes.worker import StopRequested
from xtoken_services.trainer.distributed import RankGroup
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
