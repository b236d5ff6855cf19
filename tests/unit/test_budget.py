"""What a run keeps on its GPUs, counted before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.budget import GIB, Need, check_room, needs_of, student_bytes, too_much, weight_bytes
from services.common.steps import ring_shape
from services.common.supervised import MARK
from services.trainer.optimizer import StudentOptimizer
from services.trainer.student import Student
from tests.support.runs import resolved_run
from tests.unit.trainer.students import make_model, nll, tokens
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError


def with_models(directory: Path, *, teachers: int = 1, **changes: Any) -> ResolvedRun:
    """A run whose models are there; `changes` are tables of its settings."""
    run = resolved_run(directory, teachers=teachers)
    make_model().save_pretrained(run.spec.student.model)
    for teacher in run.spec.teacher:
        make_model().save_pretrained(teacher.model)
    raw = run.spec.model_dump(mode="json")
    for name, table in changes.items():
        raw[name] = table if isinstance(table, list) else {**raw[name], **table}
    return run.model_copy(update={"spec": type(run.spec).model_validate(raw)})


@pytest.mark.parametrize(
    ("dtype", "master_weights"), [("float32", True), ("bfloat16", True), ("bfloat16", False)], ids=str
)
def test_a_student_keeps_what_was_counted(tmp_path: Path, dtype: str, master_weights: bool) -> None:
    run = with_models(tmp_path, student={"dtype": dtype}, train={"master_weights": master_weights})
    model = make_model() if master_weights else make_model().to(getattr(torch, dtype))
    student = Student(model, run.spec)
    optimizer = StudentOptimizer(student, run.spec.train, 4)
    ids = tokens()
    nll(student.outputs(ids), ids).backward()
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in (*student.model.parameters(), *student.trained.values())}
    kept |= {w.grad.data_ptr(): w.grad.nbytes for w in student.trained.values() if w.grad is not None}
    moments = [m for of_weight in optimizer.adamw.state.values() for m in of_weight.values() if m.numel() > 1]
    assert student_bytes(run.spec) == sum(kept.values()) + sum(moment.nbytes for moment in moments)


def test_ranks_share_a_student_and_adapters_need_none_of_it(tmp_path: Path) -> None:
    run = with_models(tmp_path, student={"dtype": "bfloat16"})
    weights = weight_bytes(run.spec.student.model, "bfloat16")
    two = with_models(tmp_path, student={"dtype": "bfloat16"}, train={"parallel": "fsdp"}, workers={"ranks": 2})
    assert student_bytes(run.spec) == 9 * weights
    assert student_bytes(two.spec) == 8 * weights // 2
    lora = with_models(tmp_path, student={"dtype": "bfloat16"}, train={"lora": {"rank": 4}})
    assert student_bytes(lora.spec) == weights


def test_each_gpu_holds_its_ranks_and_the_teachers_that_are_put_there(tmp_path: Path) -> None:
    run = with_models(tmp_path, teachers=2, workers={"ranks": 2})
    teachers = [teacher.model_dump(mode="json") for teacher in run.spec.teacher]
    teachers[1] |= {"gpu": 1}
    run = with_models(tmp_path, teachers=2, workers={"ranks": 2}, teacher=teachers)
    found = [[need.what for need in needs_of(run, gpu, 2, rings=False)] for gpu in (0, 1)]
    assert found == [
        ["the student's state of rank 0", "teacher 0's weights of rank 0", "teacher 1's weights of rank 1"],
        ["teacher 1's weights of rank 0", "the student's state of rank 1", "teacher 0's weights of rank 1"],
    ]
    alone = list(needs_of(run, 0, 1, rings=True))
    assert len(alone) == 2 * (1 + 2 * 2), "one GPU holds all of both ranks"
    assert alone[2] == Need("its signal's 2 slots", ring_shape(run, 0).memory_bytes)


def test_what_is_too_much_is_told_in_one_line() -> None:
    needs = [Need("the student's state", 18 * GIB), Need("teacher 0's weights", 7 * GIB)]
    assert too_much(needs, 25 * GIB, "cuda:0") == ""
    why = too_much(needs, 24 * GIB, "cuda:0")
    assert "cuda:0 has 24.00 GiB, the run keeps 25.00 there before any activation" in why
    assert "(the student's state 18.00, teacher 0's weights 7.00)" in why
    assert "teacher.gpu" in why and "\n" not in why


def test_a_cpu_has_no_budget(tmp_path: Path) -> None:
    check_room(resolved_run(tmp_path), torch.device("cpu"))


@pytest.mark.gpu
def test_a_run_that_no_gpu_holds_is_refused_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = with_models(tmp_path, workers={"signal": "cuda_ipc", "slots": 4096}, train={"micro_batch_tokens": 1 << 20})
    check_room(with_models(tmp_path), torch.device("cuda", 0))
    monkeypatch.delenv(MARK, raising=False)
    check_room(run, torch.device("cuda", 0))
    assert "its signal's 4096 slots" in caplog.text, "started by hand: a warning"
    monkeypatch.setenv(MARK, "run/teacher-0-0/1/")
    with pytest.raises(ConfigError, match="its signal's 4096 slots"):
        check_room(run, torch.device("cuda", 0))
