"""The demo's run files and its directory."""

from pathlib import Path

import pytest

from xtoken_core.config import load_run_spec
from xtoken_core.errors import InputError, XtokenError
from xtoken_services.demo.run import (
    CROSS_ENTROPY,
    DISTILLED,
    TEACHER,
    TEACHER_TRAINING,
    Training,
    _train,
    prepare_directory,
    write_run_files,
)


def test_runs_differ_in_name_output_and_loss(tmp_path: Path) -> None:
    files = write_run_files(tmp_path, TEACHER_TRAINING, Training(steps=7, seed=3))
    plain, distilled = load_run_spec(files[CROSS_ENTROPY]), load_run_spec(files[DISTILLED])
    differing = {name for name in type(plain).model_fields if getattr(plain, name) != getattr(distilled, name)}
    assert differing == {"name", "output", "loss"}
    assert plain.loss.kl_loss_weight == 0 < distilled.loss.kl_loss_weight
    assert plain.loss.ce_loss_scale == distilled.loss.ce_loss_scale
    assert distilled.loss.mode == "chain"
    assert (plain.train.max_steps, plain.seed) == (7, 3)
    teacher = load_run_spec(files[TEACHER])
    assert (teacher.teacher, teacher.train.max_steps) == ((), TEACHER_TRAINING.steps)
    assert (teacher.data, teacher.eval.path, teacher.eval.max_bytes) == (
        plain.data,
        plain.eval.path,
        plain.eval.max_bytes,
    )
    assert plain.data.paths == (tmp_path / "corpus" / "train.jsonl",)


@pytest.mark.parametrize("training", [Training(), Training(steps=1, samples_per_step=1)])
def test_run_files_are_valid_whatever_the_size(tmp_path: Path, training: Training) -> None:
    for file in write_run_files(tmp_path, training, training).values():
        spec = load_run_spec(file)
        assert spec.train.max_steps == training.steps
        assert spec.train.learning_rate == training.learning_rate
        assert spec.train.min_learning_rate == 0.00015


def test_failed_run_ends_the_demo(tmp_path: Path) -> None:
    file = write_run_files(tmp_path, Training(), Training())[DISTILLED]
    with pytest.raises(XtokenError, match="cannot read") as ended:
        _train(file)
    assert ended.value.exit_code == InputError.exit_code


def test_only_the_demos_own_directory_is_cleared(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "new" / "out")
    (tmp_path / "new" / "out" / "old.txt").write_text("left by an earlier demo")
    prepare_directory(tmp_path / "new" / "out")
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == [".xtoken-demo"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="was not made by the demo"):
        prepare_directory(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_output_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"cannot write to .*file"):
            prepare_directory(place)
