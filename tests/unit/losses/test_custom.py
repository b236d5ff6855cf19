"""Custom losses: names from the command line, the classes that are accepted, the example of the documentation."""

from pathlib import Path

import pytest
import torch

from tests.doc_blocks import ROOT, fenced
from tests.unit.losses.loss_cases import V_S, make_case
from tests.unit.supervisor.scripted_run import resolved_run
from xtoken_core.config import LossConfig, RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import ConfigError
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.alm import chunk_log_likelihood
from xtoken_core.losses.common import ChunkView
from xtoken_core.losses.custom import import_loss, losses_with
from xtoken_core.schema import with_numbers
from xtoken_services.common.run.custom_loss import check_custom_loss
from xtoken_services.common.run.loss_import import check_importable
from xtoken_services.control.validation import RefusedError, SpecValidator
from xtoken_services.supervisor.process_spec import build_process_specs

CUSTOM = LossConfig(mode="custom")


def custom_spec(directory: Path) -> RunSpec:
    return RunSpec.model_validate(resolved_run(directory, steps=2).spec.model_dump() | {"loss": {"mode": "custom"}})


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (CUSTOM, None, "add --loss module:Class"),
        (LossConfig(mode="p_kl"), "a:B", "has no effect on loss.mode"),
        (CUSTOM, "a.B", "expected module:Class"),
        (CUSTOM, "a:B.c", "expected module:Class"),
        (CUSTOM, "../a:B", "expected module:Class"),
    ],
)
def test_wrong_names(config, name, message):
    with pytest.raises(ConfigError, match=message):
        check_custom_loss(config, name)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "no_such_module:A", "cannot import no_such_module: ModuleNotFoundError"),
        ("1 / 0", "own_losses:A", "cannot import own_losses: ZeroDivisionError"),
        ("", "own_losses:A", "the module own_losses has no A"),
        ("class A: pass", "own_losses:A", "not a subclass of xtoken_core.losses.base.ChunkLoss"),
        (
            "from xtoken_core.losses.base import ChunkLoss\nclass A(ChunkLoss): mode = 'custom'",
            "own_losses:A",
            "it does not define evaluate",
        ),
        ("from xtoken_core.losses.alm import ALMLoss", "own_losses:ALMLoss", 'set mode = "custom" in the class'),
    ],
)
def test_wrong_classes(tmp_path, monkeypatch, source, name, message):
    (tmp_path / "own_losses.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_losses", raising=False)
    with pytest.raises(ConfigError, match=message) as error:
        import_loss(name)
    assert "\n" not in str(error.value)


def test_the_check_runs_in_another_process(tmp_path, monkeypatch):
    (tmp_path / "ends_loudly.py").write_text("raise SystemExit('one line')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^one line$"):
        check_importable("ends_loudly:A")


def test_only_trainers_get_the_name(tmp_path):
    run = resolved_run(tmp_path, steps=2)
    specs = build_process_specs(run, tmp_path / "r.json", [Address.parse("ipc:///private/queue")], "a:B")
    with_name = {spec.kind for spec in specs if ("--loss", "a:B") in zip(spec.command, spec.command[1:], strict=False)}
    assert with_name == {"trainer"}


def test_control_planes_refuse_custom_losses(tmp_path):
    with pytest.raises(RefusedError, match="a control plane runs no custom loss"):
        SpecValidator().validate(custom_spec(tmp_path))


def test_the_documented_example(tmp_path, monkeypatch):
    (block,) = (block for block in fenced(ROOT / "docs" / "training.md", "python") if "ChunkLoss" in block)
    assert len([line for line in block.splitlines() if line.strip() and not line.startswith("#")]) <= 12
    (tmp_path / "my_losses.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    case = make_case()
    student = case.student_logits.requires_grad_()
    loss_fn = CrossTokenizerDistillationLoss(
        CUSTOM, student_vocab_size=V_S, teachers=case.teachers, loss_classes=losses_with("my_losses:LikelihoodDistance")
    )
    loss, metrics = loss_fn(case.batch, student, case.teacher_logits)
    loss.backward()
    view = ChunkView.of(with_numbers(case.batch), 0, CUSTOM, "custom")
    P = view.max_chunks
    of_student = chunk_log_likelihood(student, case.batch["input_ids"].roll(-1, 1), view.student_chunk_id, P)
    teacher_ids = case.batch["teacher_input_ids"].roll(-1, 1)
    of_teacher = chunk_log_likelihood(case.teacher_logits[0], teacher_ids, view.teacher_chunk_id, P)
    expected = (of_student - of_teacher)[view.valid].square().mean()
    torch.testing.assert_close(metrics["kl_loss"], expected.detach().float())
    assert student.grad is not None and torch.isfinite(student.grad).all()
