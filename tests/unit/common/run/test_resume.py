"""What is found out about a run before anything is started: whose checkpoint lies there, and how long it really is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import cases
from tests.support.runs import changed, resolved_run
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.train import LoraSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.run.resolve import file_warnings
from xtoken_services.common.run.resume import CHECKPOINTS, VERSION
from xtoken_services.supervisor.run import check_output
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor


def with_checkpoint(run: ResolvedRun) -> ResolvedRun:
    checkpoints = Checkpoints(run.spec.output / CHECKPOINTS, run)
    checkpoints.save(Cursor(step=1), {"w": torch.ones(1)})
    checkpoints.wait()
    return run


@pytest.fixture
def saved(tmp_path: Path) -> ResolvedRun:
    return with_checkpoint(resolved_run(tmp_path))


def test_an_empty_output_and_its_own_checkpoint_are_accepted(tmp_path: Path, saved: ResolvedRun) -> None:
    assert check_output(resolved_run(tmp_path / "elsewhere")) == 0
    assert check_output(saved) == 1, "the step it goes on from"


def document_of(run: ResolvedRun) -> Path:
    return run.spec.output / CHECKPOINTS / "step-00000001" / "run.json"


def rewrite(run: ResolvedRun, **changes: object) -> None:
    document_of(run).write_text(json.dumps(json.loads(document_of(run).read_text()) | changes))


@pytest.mark.parametrize("cursor", [{}, {"step": "1"}, {"step": -1}, {"step": [1]}, {"step": None}], ids=str)
def test_a_cursor_of_another_type_is_named(saved: ResolvedRun, cursor: dict[str, object]) -> None:
    rewrite(saved, cursor=cursor)
    with pytest.raises(InputError, match="its cursor has no step: remove it to resume from an older one"):
        check_output(saved)


def test_the_setting_that_differs_is_named(saved: ResolvedRun) -> None:
    with pytest.raises(ConfigError, match=r"another run: what differs is the run's length \(train.max_steps"):
        check_output(saved.model_copy(update={"positions": 24}))
    with pytest.raises(ConfigError, match="another run: what differs is name; choose another output directory"):
        check_output(changed(saved, name="other"))
    with pytest.raises(ConfigError, match=r"what differs is train\.packing; choose"):
        check_output(saved.model_copy(update={"packed": True}))
    with pytest.raises(ConfigError, match="samples_per_step"):
        check_output(changed(saved, train={"samples_per_step": 4}))
    assert check_output(saved.model_copy(update={"held_out_fingerprint": "known later"})) == 1
    other = saved.student.model_copy(update={"weights_fingerprint": "of another model"})
    with pytest.raises(ConfigError, match=r"what differs is student\.model; choose another"):
        check_output(saved.model_copy(update={"student": other}))
    heavier = saved.spec.teacher[0].model_copy(update={"weight": 9.0, "context_length": 48})
    with pytest.raises(ConfigError, match=r"what differs is teacher\.0\.context_length, teacher\.0\.weight; choose"):
        check_output(changed(saved, teacher=(heavier,)))


def test_evaluations_of_one_run_are_of_one_text(tmp_path: Path) -> None:
    run = with_checkpoint(resolved_run(tmp_path).model_copy(update={"held_out_fingerprint": "a"}))
    for known in ("a", ""):
        assert check_output(run.model_copy(update={"held_out_fingerprint": known})) == 1
    with pytest.raises(ConfigError, match=r"what differs is the held-out text \(eval\.path\); choose another"):
        check_output(run.model_copy(update={"held_out_fingerprint": "b"}))


def test_another_precision_is_another_run(saved: ResolvedRun) -> None:
    with pytest.raises(ConfigError, match=r"what differs is student\.dtype; choose another"):
        check_output(changed(saved, student={"dtype": "bfloat16"}))
    with pytest.raises(ConfigError, match=r"what differs is student\.dtype, train\.master_weights; choose another"):
        check_output(changed(saved, student={"dtype": "bfloat16"}, train={"master_weights": False}))
    small = saved.spec.teacher[0].model_copy(update={"dtype": "bfloat16", "quantized": "fp8"})
    with pytest.raises(ConfigError, match=r"what differs is teacher\.0\.dtype, teacher\.0\.quantized; choose"):
        check_output(changed(saved, teacher=(small,)))


def test_a_teacher_that_was_taken_away_makes_another_run(tmp_path: Path) -> None:
    with_checkpoint(resolved_run(tmp_path, teachers=2))
    with pytest.raises(ConfigError, match=r"what differs is teacher\.1; choose"):
        check_output(resolved_run(tmp_path))


def test_how_it_is_computed_may_change(saved: ResolvedRun) -> None:
    for part, changes in (
        ("train", {"master_weights": False}),  # a student in float32 has no masters either way
        ("train", {"learning_rate": 1e-3, "grad_clip": None, "parallel": "fsdp"}),
        ("student", {"compile": True, "checkpoint_activations": True, "blockwise_head": True}),
        ("workers", {"ranks": 2, "collators": 3, "slots": 4, "transport": "shared_memory"}),
    ):
        assert check_output(changed(saved, **{part: changes})) == 1, changes


def test_a_field_newer_than_the_checkpoint_has_its_default(saved: ResolvedRun) -> None:
    identity = json.loads(document_of(saved).read_text())["identity"]
    teacher, loss = identity["teacher"][0], identity["loss"]
    del identity["lora"], teacher["quantized"], teacher["weight"], loss["reverse_kl"]
    rewrite(saved, identity=identity)
    assert check_output(saved) == 1
    with pytest.raises(ConfigError, match=r"what differs is loss\.reverse_kl; choose another"):
        check_output(changed(saved, loss={"reverse_kl": True}))
    with pytest.raises(ConfigError, match=r"what differs is train\.lora; choose another"):
        check_output(changed(saved, train={"lora": LoraSpec()}))


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_version_of_the_form_is_refused(saved: ResolvedRun, version: int) -> None:
    rewrite(saved, version=version)
    with pytest.raises(InputError, match=f"step-00000001 has version {version}, this xtoken reads version {VERSION}"):
        check_output(saved)


def test_an_unknown_field_is_named(saved: ResolvedRun) -> None:
    identity = json.loads(document_of(saved).read_text())["identity"]
    identity["loss"]["colour"] = "red"
    rewrite(saved, identity=identity)
    with pytest.raises(InputError, match=r"cannot read the checkpoint .*loss\.colour"):
        check_output(saved)


@pytest.mark.parametrize("text", ["{}", "", "null", '{"a":' * 50_000, '{"identity": [], "cursor": 1}'])
def test_a_checkpoint_that_says_nothing_is_named(saved: ResolvedRun, text: str) -> None:
    document_of(saved).write_text(text)
    with pytest.raises(InputError, match=r"step-00000001.*remove it"):
        check_output(saved)


def test_what_the_files_make_of_a_run_is_said(tmp_path: Path) -> None:
    run = resolved_run(tmp_path)
    assert run.steps == 4
    assert list(file_warnings(changed(run, train={"max_steps": 4, "warmup_steps": 4}))) == []
    shorter, early = file_warnings(changed(run, train={"max_steps": 5, "warmup_steps": 6}))
    assert shorter == "the run has 4 steps, not train.max_steps = 5: its text has 32 records (data.epochs = 1)"
    assert early == "the run ends after 4 steps, its warm-up would after train.warmup_steps = 6"


def test_a_warm_up_longer_than_the_schedule_of_the_completions_is_said(tmp_path: Path) -> None:
    run = changed(resolved_run(tmp_path), train={"warmup_steps": 2})

    def warnings(after: int) -> list[str]:
        return list(file_warnings(changed(run, rollout=RolloutSpec(after=after, learning_rate=1e-5))))

    assert warnings(2) == []
    (early,) = warnings(3)
    assert early.startswith("the shorter schedule of rollout.after ends after 1 steps, its warm-up would after")


@cases(
    "changes, said",
    ({"parallel": "fsdp"}, "does nothing for a single rank"),
    ({"reduce_dtype": "bfloat16"}, 'do nothing without train.parallel = "fsdp"'),
    ({"min_learning_rate": 1.0}, "min_learning_rate = 1 is above train.learning_rate"),
)
def test_settings_without_effect_are_told(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    (remark,) = file_warnings(changed(resolved_run(tmp_path), train=changes))
    assert said in remark


@cases(
    "loss, said",
    ({"mode": "chain", "vocab_topk": 64}, ["loss.vocab_topk is not read by chain"]),
    ({"mode": "p_kl", "vocab_topk": 64, "uncommon_topk": 9}, ["loss.uncommon_topk is not read by p_kl"]),
    ({"mode": "custom", "vocab_topk": 64}, []),
)
def test_settings_that_no_mode_reads_are_named(tmp_path: Path, loss: dict[str, Any], said: list[str]) -> None:
    assert list(file_warnings(changed(resolved_run(tmp_path), loss=LossConfig(**loss)))) == said
