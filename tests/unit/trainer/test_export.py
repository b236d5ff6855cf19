"""A model from a checkpoint: which one, the very weights, its figures, and nothing where it cannot be."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from typer.testing import CliRunner

from tests.architecture.conftest import run_without
from tests.architecture.test_imports import HEAVY
from tests.support.checkpointed import run_directory, train, write_lines
from tests.support.runs import changed
from tests.unit.trainer.students import make_model, tokens
from xtoken_core.errors import ConfigError, InputError, OutputError, XtokenError
from xtoken_services.cli.app import app
from xtoken_services.common.files.allowed_paths import VARIABLE, RefusedError, Roots
from xtoken_services.trainer import export_checkpoint as module
from xtoken_services.trainer.export import export_model
from xtoken_services.trainer.export_checkpoint import Export, choose, export_checkpoint

BF16 = {"dtype": "bfloat16"}
SPARED = {"compile": True, "checkpoint_activations": True, "blockwise_head": True}


def files_below(directory: Path) -> dict[str, bytes]:
    """Every file with what is in it."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model.eval()(tokens()).logits


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("student", "train_spec"),
    [
        pytest.param({}, {}, id="float32"),
        pytest.param(BF16, {}, id="master weights"),
        pytest.param(BF16, {"master_weights": False}, id="bfloat16"),
        pytest.param(SPARED, {"parallel": "fsdp"}, id="what saves memory", marks=pytest.mark.slow),  # compiles
    ],
)
def test_the_model_is_the_student_of_that_step(
    tmp_path: Path, family: str, student: dict[str, Any], train_spec: dict[str, Any]
) -> None:
    run = run_directory(tmp_path, make_model(family), student=student, train=train_spec)
    saved = train(run, [4, 8])
    assert export_checkpoint(tmp_path).target == tmp_path / "model-step-00000008"
    assert export_checkpoint(tmp_path, 4, tmp_path / "a" / "b").target == tmp_path / "a" / "b"
    for step, place in ((8, tmp_path / "model-step-00000008"), (4, tmp_path / "a" / "b")):
        found = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
        assert found.dtype == getattr(torch, run.spec.student.dtype)
        expected = saved[step].model.state_dict()
        assert found.state_dict().keys() == expected.keys()
        for name, value in found.state_dict().items():
            assert torch.equal(value, expected[name]), name
        assert AutoTokenizer.from_pretrained(place)("def x")["input_ids"]
    assert not torch.equal(logits_of(saved[4].model), logits_of(saved[8].model))
    assert not [path.name for path in tmp_path.rglob(".*.tmp")]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("own", "told", "expected"),
    [
        (torch.bfloat16, {}, torch.bfloat16),
        (torch.float16, {}, torch.float16),
        (torch.float32, {}, torch.float32),
        (torch.bfloat16, {"export_dtype": "float32"}, torch.float32),
        (torch.float32, {"export_dtype": "bfloat16"}, torch.bfloat16),
    ],
    ids=str,
)
def test_an_export_keeps_the_models_dtype_unless_it_is_told(
    tmp_path: Path, family: str, own: torch.dtype, told: dict[str, Any], expected: torch.dtype
) -> None:
    run = run_directory(tmp_path, make_model(family).to(own), student={"dtype": "float32", **told})
    trained = train(run, [4])[4].model.state_dict()
    place = export_checkpoint(tmp_path).target
    assert json.loads((place / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    stored = load_file(place / "model.safetensors")
    for name, value in stored.items():
        assert torch.equal(value, trained[name].to(expected)) if name in trained else value.dtype == expected, name
    assert {value.dtype for value in stored.values()} == {expected}


@pytest.mark.parametrize("kept", ["merged", "adapter"])
@pytest.mark.parametrize("student", [{}, BF16], ids=["float32", "bfloat16"])
def test_adapters_are_merged_or_saved_alone_as_at_the_runs_end(
    tmp_path: Path, student: dict[str, Any], kept: str
) -> None:
    peft = pytest.importorskip("peft")
    lora = {"rank": 4, "targets": ["q_proj", "v_proj"], "export": kept}
    run = run_directory(tmp_path, make_model(), student=student, train={"lora": lora})
    saved = train(run, [4])
    place = export_checkpoint(tmp_path).target
    assert (place / "adapter_model.safetensors").exists() == (kept == "adapter")
    assert (place / "model.safetensors").exists() == (kept == "merged")
    expected = logits_of(saved[4].model)
    if kept == "merged":
        found = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    else:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=getattr(torch, run.spec.student.dtype))
        found = peft.PeftModel.from_pretrained(base, place)
    tolerance = 0.1 if student else 1e-4
    torch.testing.assert_close(logits_of(found), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("template", "ends"), [(None, 1), ("C", 1), ("C<|end_of_text|>", 1), ("C<|pad|>", [1, 2])])
def test_an_export_names_the_token_that_ends_an_answer(tmp_path: Path, template: str | None, ends: Any) -> None:
    borrowed = tmp_path / "template.jinja"
    if template is not None:
        loop = "{% for m in messages %}" + template.replace("C", "{{ m['content'] }}") + "{% endfor %}"
        borrowed.write_text(loop, encoding="utf-8")
    student = {} if template is None else {"chat_template": borrowed}
    train(run_directory(tmp_path, make_model(eos_token_id=1), student=student), [4])
    place = export_checkpoint(tmp_path).target
    assert GenerationConfig.from_pretrained(place).eos_token_id == ends
    assert (AutoTokenizer.from_pretrained(place).chat_template is None) == (template is None)


def test_the_card_tells_the_figures_up_to_the_step(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held out\n")
    run = run_directory(tmp_path, make_model(), eval={"path": tmp_path / "held.txt", "every": 4})
    train(run, [4, 8])
    write_lines(
        tmp_path, "steps.jsonl", [{"step": step, "loss": 9 - step / 8} for step in range(9)], torn='{"step": 9, "lo'
    )
    held_out = [{"step": at, "bits_per_byte": 3 - at / 16, "documents": 1, "bytes": 9} for at in (0, 4, 8)]
    write_lines(tmp_path, "eval.jsonl", held_out)
    early, late = (
        (export_checkpoint(tmp_path, step).target / "README.md").read_text(encoding="utf-8") for step in (4, 8)
    )
    assert "Taken after 4 of the run's 10 steps." in early
    assert "| optimiser steps | 4 of 8 samples |" in early
    assert "| samples trained, skipped, dead | 32, 0, 0 |" in early
    assert "| loss at the last step | 8.625 |" in early
    assert "| metric | after 0 steps | after 4 steps |" in early
    assert "| bits per byte | 3.0000 | 2.7500 |" in early
    assert "| loss at the last step | 8.125 |" in late
    assert "| bits per byte | 3.0000 | 2.5000 |" in late
    write_lines(tmp_path, "eval.jsonl", held_out[:1])
    once = (export_checkpoint(tmp_path, 4, tmp_path / "once").target / "README.md").read_text(encoding="utf-8")
    assert "| metric | after 0 steps |\n|---|---|\n| bits per byte | 3.0000 |" in once


def test_a_directory_that_has_moved_is_exported_where_it_is(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "made", make_model())
    train(run, [4])
    write_lines(run.spec.output, "steps.jsonl", [{"step": 3, "loss": 2.5}])
    moved = tmp_path / "moved"
    shutil.copytree(run.spec.output, moved, ignore=shutil.ignore_patterns("student"))
    shutil.rmtree(run.spec.output / "checkpoints")
    (run.spec.output / "steps.jsonl").unlink()
    place = export_checkpoint(moved).target
    assert place == moved / "model-step-00000004"
    assert "| loss at the last step | 2.5 |" in (place / "README.md").read_text(encoding="utf-8")


# What is refused


def test_mistakes_are_told_in_one_line_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "out", make_model())
    output = run.spec.output

    def refused(*arguments: str) -> str:
        with pytest.raises(XtokenError) as error:
            CliRunner().invoke(app, ["export", *arguments], catch_exceptions=False)
        assert error.value.exit_code == 2
        return str(error.value)

    assert f"{tmp_path} is not a run directory: cannot read" in refused(str(tmp_path))
    assert f"{output} holds no checkpoint yet: a run writes one every train.checkpoint_every" in refused(str(output))
    for step in (4, 8):
        (output / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (output / "checkpoints" / ".step-00000012.tmp").mkdir()
    assert "holds no checkpoint of step 12: there are those of step 4, 8" in refused(str(output), "--step", "12")
    (output / "model-step-00000008").mkdir()
    assert "model-step-00000008 is there already: remove it, or" in refused(str(output))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link is there already" in refused(str(output), "--to", str(tmp_path / "link"))
    (output / "resolved.json").write_text("{}")
    done = run_without(HEAVY, "xtoken_services.cli", "export", str(output))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "resolved.json: spec: " in line


@pytest.mark.parametrize("file", ["run.json", "index.json", "rank-00000.safetensors"])
def test_a_damaged_checkpoint_leaves_nothing(tmp_path: Path, file: str) -> None:
    train(run_directory(tmp_path, make_model()), [4])
    damaged = tmp_path / "checkpoints" / "step-00000004" / file
    damaged.write_bytes(damaged.read_bytes()[:30])
    before = files_below(tmp_path)
    with pytest.raises(InputError, match=r"^cannot read the checkpoint .*step-00000004[^\n]*$"):
        export_checkpoint(tmp_path)
    assert files_below(tmp_path) == before


def test_checkpoints_that_others_may_write_and_those_of_another_run_are_refused(tmp_path: Path) -> None:
    run = run_directory(tmp_path, make_model())
    train(run, [4])
    (tmp_path / "resolved.json").write_text(run.model_copy(update={"data_fingerprint": "e"}).model_dump_json())
    with pytest.raises(ConfigError, match="belongs to another run: what differs is the text"):
        export_checkpoint(tmp_path)
    (tmp_path / "resolved.json").write_text(run.model_dump_json())
    (tmp_path / "checkpoints").chmod(0o770)
    with pytest.raises(InputError, match="chmod 700"):
        export_checkpoint(tmp_path)


def test_a_checkpoint_that_the_run_removes_meanwhile_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = train(run_directory(tmp_path, make_model()), [4, 8])
    older, newer = (tmp_path / "checkpoints" / f"step-{step:08d}" for step in (4, 8))
    hidden = newer.rename(tmp_path / "hidden")
    calls = []

    def chosen_and_removed(*arguments: Any) -> Export:
        found = choose(*arguments)
        calls.append(found.step)
        if len(calls) == 2:  # the first is before the student is loaded
            hidden.rename(newer)
            shutil.rmtree(older)
        return found

    monkeypatch.setattr(module, "choose", chosen_and_removed)
    place = export_checkpoint(tmp_path).target
    assert (calls[:2], place.name) == ([4, 4], "model-step-00000008")
    found = AutoModelForCausalLM.from_pretrained(place)
    torch.testing.assert_close(logits_of(found), logits_of(saved[8].model))


def test_a_step_that_the_run_removes_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run_directory(tmp_path, make_model()), [4, 8])

    def chosen_and_removed(*arguments: Any) -> Export:
        found = choose(*arguments)
        shutil.rmtree(found.checkpoint)
        return found

    monkeypatch.setattr(module, "choose", chosen_and_removed)
    with pytest.raises(InputError, match="no checkpoint of step 4: there are those of step 8"):
        export_checkpoint(tmp_path, 4)
    assert not list(tmp_path.glob("*model-*"))


def test_a_control_planes_roots_hold_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_directory(tmp_path / "runs" / "out", make_model())
    train(run, [4])
    (tmp_path / "data").mkdir()

    def allow(read: Path, write: Path) -> None:
        monkeypatch.setenv(VARIABLE, Roots.of([read], [write]).environment[VARIABLE])

    allow(tmp_path / "data", tmp_path / "data")
    with pytest.raises(RefusedError, match=r"OUTPUT: .*lies under none of"):
        export_checkpoint(run.spec.output)
    allow(tmp_path / "runs", tmp_path / "data")
    with pytest.raises(RefusedError, match=r"--to: .*is written: it must lie below"):
        export_checkpoint(run.spec.output)
    allow(tmp_path / "data", tmp_path / "runs")
    with pytest.raises(RefusedError, match=r"--to: .*is written: it must lie below"):
        export_checkpoint(run.spec.output, None, tmp_path / "data" / "model")
    elsewhere = shutil.copytree(tmp_path / "runs" / "out" / "student", tmp_path / "elsewhere")
    student = run.spec.student.model_copy(update={"model": elsewhere})
    (run.spec.output / "resolved.json").write_text(changed(run, student=student).model_dump_json())
    with pytest.raises(RefusedError, match=r"the student's model: .*lies under none of"):
        export_checkpoint(run.spec.output)
    (run.spec.output / "resolved.json").write_text(run.model_dump_json())
    assert export_checkpoint(run.spec.output).target.is_dir()


# How it is written


def test_every_file_is_on_the_disk_before_the_model_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def checked(path: Path, target: Path) -> Path:
        if target.name == "model-step-00000004":
            below = [path, *path.rglob("*")]
            assert len(below) > 5
            assert {str(place.resolve()) for place in below} <= set(synced)
        return rename(path, target)

    train(run_directory(tmp_path, make_model()), [4])
    synced.clear()
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    assert export_checkpoint(tmp_path).target.is_dir()
    assert synced[-1] == str(tmp_path.resolve())


class FullDisk:
    """A tokenizer that finds no room."""

    def save_pretrained(self, directory: Path) -> None:
        assert (directory / "model.safetensors").exists()
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("replaces", [True, False])
def test_a_model_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, replaces: bool) -> None:
    place = tmp_path / "model"
    if replaces:
        place.mkdir()
        (place / "README.md").write_text("before")
    before = files_below(tmp_path)
    with pytest.raises(OutputError, match=r"cannot write the model .*model: No space left on device"):
        export_model(place, make_model(), None, FullDisk(), "card", replaces=replaces)
    assert files_below(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if replaces else [])


def test_a_model_that_another_has_written_meanwhile_stays(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "out", make_model())
    tokenizer = AutoTokenizer.from_pretrained(run.spec.student.model)
    place = tmp_path / "model"
    place.mkdir()
    (place / "README.md").write_text("another's")
    with pytest.raises(OutputError, match=r"cannot write the model .*model: Directory not empty"):
        export_model(place, make_model(), None, tokenizer, "card", replaces=False)
    assert files_below(place) == {"README.md": b"another's"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_the_command_tells_where_the_model_is(tmp_path: Path) -> None:
    train(run_directory(tmp_path, make_model()), [4, 8])
    place = tmp_path / "model-step-00000008"
    told = CliRunner().invoke(app, ["export", str(tmp_path)])
    assert (told.exit_code, told.stdout) == (0, f"{place}: after 8 of 10 steps\n")
    other = ["export", str(tmp_path), "--step", "4", "--to", str(tmp_path / "four"), "--json"]
    told = CliRunner().invoke(app, other)
    assert json.loads(told.stdout) == {"directory": str(tmp_path / "four"), "step": 4}
    assert files_below(tmp_path / "four").keys() == files_below(place).keys()
