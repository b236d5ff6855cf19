"""Losses by mode, teachers from projection files, and custom losses: names, classes, the documented example."""

from typing import get_args

import pytest
import torch

from tests.doc_blocks import ROOT, fenced
from tests.support.cases import cases
from tests.unit.losses.loss_cases import V_S, loss_of, make_case
from tests.unit.supervisor.scripted_run import resolved_run
from xtoken_core.config import LossConfig
from xtoken_core.config.loss import COLUMN_SELECTING_MODES, DENSE_ONLY, LossMode
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import ConfigError
from xtoken_core.losses.alm import chunk_log_likelihood
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import ChunkView, Divergence
from xtoken_core.losses.custom import import_loss, losses_with
from xtoken_core.losses.gold import GoldLoss
from xtoken_core.losses.p_kl import PKLLoss
from xtoken_core.losses.registry import LOSSES, load_teacher
from xtoken_core.schema import with_numbers
from xtoken_services.common.run.custom_loss import check_custom_loss
from xtoken_services.common.run.loss_import import check_importable
from xtoken_services.supervisor.process_spec import build_process_specs

CPU = torch.device("cpu")


def loss_from(config, path):
    """The random case's loss with the projection of a file."""
    case = make_case()
    case.teachers = [load(path)]
    return loss_of(case, config)(case.batch, case.student_logits, case.teacher_logits)[0]


def load(path):
    return load_teacher(path, vocab_size=31, student_vocab_size=V_S, device=CPU, weight=2.0)


@pytest.fixture
def sparse(tmp_path):
    """The random case's projection in the public sparse form."""
    teacher = make_case().teachers[0]
    pairs = zip(teacher.indices.tolist(), teacher.likelihoods.tolist(), strict=True)
    rows = enumerate(zip(ids, weights, strict=True) for ids, weights in pairs)
    torch.save({(s, t): w for s, row in rows for t, w in row if t >= 0}, tmp_path / "sparse.pt")
    return tmp_path / "sparse.pt"


def test_every_mode_has_a_loss():
    assert {*LOSSES, "custom"} == set(get_args(LossMode))


def test_modes_that_select_columns_are_those_whose_classes_do():
    assert {mode for mode, loss in LOSSES.items() if loss.columns is not ChunkLoss.columns} == COLUMN_SELECTING_MODES


@pytest.mark.parametrize("mode", sorted(set(LOSSES) - DENSE_ONLY - {"chain"}))
def test_a_sparse_projection_trains_like_the_dense_one(mode, sparse, tmp_path):
    config, teacher = LossConfig(mode=mode), make_case().teachers[0]
    torch.save({"indices": teacher.indices, "likelihoods": teacher.likelihoods}, tmp_path / "dense.pt")
    expected = loss_from(config, tmp_path / "dense.pt")
    torch.testing.assert_close(loss_from(config, sparse), expected, rtol=1e-6, atol=0)
    assert load(sparse).weight == 2.0 and not load(sparse).same_tokenizer


@pytest.mark.parametrize("mode", sorted(DENSE_ONLY))
def test_a_sparse_projection_is_refused_where_rows_are_read(mode, sparse):
    with pytest.raises(ConfigError, match="dense top-k projection"):
        loss_from(LossConfig(mode=mode), sparse)


def test_a_teacher_without_projection_has_the_students_tokenizer_unless_its_own():
    assert load(None).same_tokenizer
    assert not load_teacher(None, vocab_size=31, student_vocab_size=V_S, device=CPU, own_tokenizer=True).same_tokenizer


class HalfOfEveryChunk(GoldLoss):
    """A loss of a user's own: half of gold's."""

    def evaluate(self, inputs):
        divergence = super().evaluate(inputs)
        return Divergence(tuple(part / 2 for part in divergence.parts))


def test_other_classes_may_be_given():
    case = make_case()
    arguments = case.batch, case.student_logits, case.teacher_logits
    config = LossConfig(mode="gold", ce_loss_scale=0.0)
    expected, _ = loss_of(case, config)(*arguments)
    classes = {"p_kl": PKLLoss, "gold": HalfOfEveryChunk}
    loss, metrics = loss_of(case, config, loss_classes=classes)(*arguments)
    torch.testing.assert_close(loss, expected / 2)
    assert "proj_accuracy_t0" not in metrics


CUSTOM = LossConfig(mode="custom")


@cases(
    "config, name, message",
    (CUSTOM, None, "add --loss module:Class"),
    (LossConfig(mode="p_kl"), "a:B", "has no effect on loss.mode"),
    (CUSTOM, "a.B", "expected module:Class"),
    (CUSTOM, "a:B.c", "expected module:Class"),
    (CUSTOM, "../a:B", "expected module:Class"),
)
def test_wrong_names(config, name, message):
    with pytest.raises(ConfigError, match=message):
        check_custom_loss(config, name)


@cases(
    "source, name, message",
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
        check_importable(CUSTOM, "ends_loudly:A")


def test_only_trainers_get_the_name(tmp_path):
    run = resolved_run(tmp_path, steps=2)
    specs = build_process_specs(run, tmp_path / "r.json", [Address.parse("ipc:///private/queue")], "a:B")
    with_name = {spec.kind for spec in specs if ("--loss", "a:B") in zip(spec.command, spec.command[1:], strict=False)}
    assert with_name == {"trainer"}


def test_the_documented_example(tmp_path, monkeypatch):
    (block,) = (block for block in fenced(ROOT / "docs" / "training.md", "python") if "ChunkLoss" in block)
    assert len([line for line in block.splitlines() if line.strip() and not line.startswith("#")]) <= 12
    (tmp_path / "my_losses.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    case = make_case()
    student = case.student_logits.requires_grad_()
    loss_fn = loss_of(case, CUSTOM, loss_classes=losses_with("my_losses:LikelihoodDistance"))
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
