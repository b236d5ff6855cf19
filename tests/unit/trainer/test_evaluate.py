"""Held-out text during a run: it says that it goes on, it may be left, and it keeps a head in blocks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.worker import StopRequested
from services.trainer.group import Group
from services.trainer.held_out import HeldOutLoss
from services.trainer.student import Student
from tests.support.ranks import start_ranks
from tests.support.runs import resolved_run
from tests.unit.test_evaluation import byte_tokenizer, llama
from tests.unit.trainer.students import settings
from xtoken_core.config.spec import RunSpec
from xtoken_core.evaluation import evaluate
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher

READ: dict[str, Any] = {"context_length": 8, "batch_tokens": 16, "device": "cpu", "max_bytes": 10**6}
TEXTS = ["0123456789" * 5, "def f(x):\n    return x"]

WAITING = """
import sys, time
from datetime import timedelta
from services.trainer import group as module
module.MEETING, module.BEAT = timedelta(seconds=10), timedelta(seconds=0.1)
group, beats = module.Group.of_environment(), []
for pg in (module.dist.group.WORLD, group.background):
    assert pg._get_backend(module.torch.device("cpu")).options._timeout == module.TIMEOUT
group.beat = lambda: beats.append(1)
if group.leads:
    if sys.argv[1] == "dies":
        sys.exit(9)
    time.sleep(1.5)
group.wait()
assert group.leads or len(beats) > 3, beats
print(group.from_leader(7))
group.close()
"""


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


def test_a_single_rank_waits_for_nobody() -> None:
    group = Group(0, 1)
    group.wait()
    assert group.from_leader(3) == 3


def test_an_evaluation_goes_on_batch_by_batch_and_may_be_left_between_them() -> None:
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    model, calls = llama(259).train(), list[int]()
    evaluate(model, tokenizer, TEXTS, **READ, progress=lambda: calls.append(1))
    assert len(calls) == 5  # 7 windows of 8 tokens and 2 shorter ones, two at a time

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


def test_the_held_out_loss_goes_on_batch_by_batch_and_is_the_same_blockwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    teacher = tmp_path / "teacher"
    llama(259).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    raw = resolved_run(tmp_path).spec.model_dump() | {
        "teacher": [{"model": teacher, "context_length": 64}],
        "eval": {"path": tmp_path / "text.jsonl", "teacher_kl": True},
    }
    found, calls = [], list[int]()
    for blockwise in (False, True):
        spec = RunSpec.model_validate(raw | {"student": raw["student"] | {"blockwise_head": blockwise}})
        loss = CrossTokenizerDistillationLoss(
            spec.loss, student_vocab_size=259, teachers=[LossTeacher(259, None, None, 1.0)], device=torch.device("cpu")
        )
        student = Student(llama(320), spec).eval()
        if blockwise:
            monkeypatch.setattr(student.model.lm_head, "forward", None)
        held_out = HeldOutLoss(spec, loss, tokenizer, TEXTS * 3)
        found.append(held_out.measure(student, progress=lambda: calls.append(1)))
    assert len(calls) == 2 * (1 + len(held_out.batches)) and len(held_out.batches) > 1
    assert found[0].keys() == found[1].keys()
    assert list(found[1].values()) == pytest.approx(list(found[0].values()), rel=0.02)
