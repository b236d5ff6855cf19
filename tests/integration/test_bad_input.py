"""What a user gets for bad input: one clear line that names the thing, a non-zero exit, nothing half-written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.integration.conftest import Crew, Refusal, Tiny
from tests.support.tiny_run import TinyAssets, documents, tiny_spec, write_jsonl, write_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.cli.app import app
from xtoken_services.common.run.status import RunState

Change = Callable[[Path, TinyAssets], dict[str, Any]]


def raw_spec(assets: TinyAssets, directory: Path) -> dict[str, Any]:
    return dict(json.loads(tiny_spec(assets, directory, records=16).model_dump_json()))


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def missing_tokenizer(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    return {"student.tokenizer": str(tmp / "nowhere")}


def damaged_tokenizer(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    (copied(assets.student, tmp / "damaged") / "tokenizer.json").write_text("{]")
    return {"student.tokenizer": str(tmp / "damaged")}


def damaged_weights(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    (copied(assets.teacher, tmp / "damaged") / "model.safetensors").write_bytes(b"nothing of the kind")
    return {"teacher.model": str(tmp / "damaged")}


def missing_data(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    return {"data.path": str(tmp / "no-data.jsonl")}


def wrong_field(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    return {"data.field": "content"}


def missing_projection(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    return {"teacher.projection": str(tmp / "no-projection.safetensors")}


def mode_of_no_teacher(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    """The only teacher has the student's tokenizer, and no projection is named."""
    return {"teacher.projection": None, "teacher.tokenizer": str(assets.student), "loss.mode": "gold"}


def shorter_teacher(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    """A teacher with the student's tokenizer that cannot read as many tokens."""
    return {"teacher.projection": None, "teacher.tokenizer": str(assets.student), "teacher.context_length": 48}


def only_messages(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    """A file of conversations, which the tiny tokenizers cannot take."""
    answer = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]}
    (tmp / "chat.jsonl").write_text((json.dumps(answer) + "\n") * 16)
    return {"data.path": str(tmp / "chat.jsonl")}


def damaged_projection(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    (tmp / "damaged.safetensors").write_bytes(b"\x00" * 40)
    return {"teacher.projection": str(tmp / "damaged.safetensors")}


def foreign_projection(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    return {"teacher.projection": str(assets.other_projection)}


def narrow_head(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    model = copied(assets.teacher, tmp / "narrow")
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = 100
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    heads = {name: value for name, value in weights.items() if "embed" in name or "head" in name}
    save_file(weights | {name: value[:100].contiguous() for name, value in heads.items()}, model / "model.safetensors")
    return {"teacher.model": str(model)}


def too_few_positions(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    config = copied(assets.teacher, tmp / "short") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "n_positions": 36}))
    return {"teacher.model": str(tmp / "short")}


def sparse_projection(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    torch.save({(0, 1): 1.0}, tmp / "sparse.pt")
    return {"teacher.projection": str(tmp / "sparse.pt"), "loss.mode": "h_kl"}


def unknown_family(tmp: Path, assets: TinyAssets) -> dict[str, Any]:
    config = copied(assets.teacher, tmp / "mamba") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "mamba2"}))
    return {"teacher.model": str(tmp / "mamba"), "train.packing": "on"}


CASES: list[tuple[Change, list[str]]] = [
    (missing_tokenizer, ["tokenizer", "nowhere"]),
    (damaged_tokenizer, ["tokenizer", "damaged"]),
    (damaged_weights, ["the teacher", "damaged"]),
    (missing_data, ["no-data.jsonl"]),
    (wrong_field, ["content"]),
    (missing_projection, ["there is no projection file", "no-projection.safetensors", "xtoken projection build"]),
    (mode_of_no_teacher, ['mode = "gold" is used by no teacher']),
    (shorter_teacher, ["teacher.context_length = 48", "up to 64 (student.context_length)"]),
    (only_messages, ["chat.jsonl:1", "student's tokenizer has no chat template", "set student.chat_template to a"]),
    (damaged_projection, ["damaged.safetensors"]),
    (sparse_projection, ["teacher.projection", "sparse.pt is sparse", "h_kl", "xtoken projection build"]),
    (foreign_projection, ["to-other.safetensors", "xtoken projection build"]),
    (narrow_head, ["head", "100"]),
    (unknown_family, ['train.packing = "on"', "the teacher (", "mamba2", 'set it to "auto" or "off"']),
    (too_few_positions, ["the teacher's context_length = 96", "36 positions", "lower it to 32"]),
]


def changed_run(directory: Path, assets: TinyAssets, change: Change) -> str:
    """A run file with the change."""
    raw = raw_spec(assets, directory)
    for place, value in change(directory, assets).items():
        part, name = place.split(".")
        (raw["teacher"][0] if part == "teacher" else raw[part])[name] = value
    return str(write_run(directory, raw))


@pytest.mark.parametrize(("change", "words"), [pytest.param(*case, id=case[0].__name__) for case in CASES])
def test_a_run_with_bad_input_says_what_is_wrong(
    tiny: Tiny, refusal: Refusal, change: Change, words: list[str]
) -> None:
    line = refusal("run", changed_run(tiny.path, tiny.assets, change))
    assert all(word in line for word in words), line
    assert not (tiny.path / "out" / "model").exists()


def test_dry_run_refuses_what_a_start_refuses(assets: TinyAssets, tmp_path: Path, refusal: Refusal) -> None:
    file = changed_run(tmp_path, assets, narrow_head)
    assert refusal("run", file, "--dry-run") == refusal("run", file)


@pytest.mark.slow
def test_dry_run_writes_nothing(assets: TinyAssets, tmp_path: Path) -> None:
    raw = raw_spec(assets, tmp_path)
    del raw["eval"]
    raw["data"]["path"] = str(write_jsonl(tmp_path / "long.jsonl", documents(200, seed=2)))
    done = CliRunner().invoke(app, ["run", str(write_run(tmp_path, raw)), "--dry-run"])
    assert done.exit_code == 0, done.stderr
    assert done.stderr.startswith("checking files, tokenizers and text")
    assert done.output.index("[student]") < done.output.index(" samples in "), "what matters is last"
    assert "[student]" in done.stdout and "eval: 2% of the records of data.path" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_missing_run_file_and_one_that_is_no_toml(tmp_path: Path, refusal: Refusal) -> None:
    assert "nothing.toml" in refusal("run", str(tmp_path / "nothing.toml"))
    (tmp_path / "broken.toml").write_text("a = [")
    assert "broken.toml is not TOML" in refusal("run", str(tmp_path / "broken.toml"))


@pytest.mark.slow
def test_a_full_disk_at_checkpoint_time_ends_the_run(
    assets: TinyAssets, small_disk: Path, start: Callable[[RunSpec], Crew]
) -> None:
    ending = start(tiny_spec(assets, small_disk, records=64)).join()  # without the check of a start
    assert (ending.state, ending.exit_code) == (RunState.FAILED, 2)
    assert "checkpoint" in ending.error and "disk is full" in ending.error
    assert [path.name for path in (small_disk / "out" / "checkpoints").iterdir()] == []


@pytest.mark.slow
def test_a_last_checkpoint_that_cannot_be_written_is_told_when_the_run_has_stopped(
    assets: TinyAssets, tmp_path: Path, start: Callable[[RunSpec], Crew]
) -> None:
    spec = tiny_spec(assets, tmp_path, records=80_000, train={"checkpoint_every": 100_000})
    crew = start(spec)
    crew.wait_for_steps(2)
    place = spec.output / "checkpoints"
    place.write_text("a file where the directory would go")
    ending = crew.stop()
    assert ending.state == RunState.STOPPED
    assert ending.error.startswith(
        f"trainer-0 exited with status 2 while the run was stopped: cannot write the checkpoint {place}/step-"
    )
    assert "File exists" in ending.error
    assert "\n" not in ending.error


def test_a_run_with_a_model_that_cannot_be_packed_is_padded_and_says_so(assets: TinyAssets, tmp_path: Path) -> None:
    from xtoken_services.common.run.resolve import file_warnings, resolve_run

    assert resolve_run(tiny_spec(assets, tmp_path, records=16)).packed
    assert not resolve_run(tiny_spec(assets, tmp_path, records=16, train={"packing": "off"})).packed
    config = copied(assets.student, tmp_path / "longrope") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_parameters": {"rope_type": "longrope"}}))
    student = {"model": tmp_path / "longrope", "context_length": 64}
    run = resolve_run(tiny_spec(assets, tmp_path, records=16, student=student))
    assert not run.packed
    (remark,) = (text for text in file_warnings(run) if "padded" in text)
    assert "the student" in remark and "longrope" in remark


def test_tasks_of_messages_need_a_template_and_code_is_run_only_if_asked_for(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xtoken_services.common.processes import run_code
    from xtoken_services.common.run.resolve import resolve_run

    task = tmp_path / "code.jsonl"
    task.write_text('{"prompt": "x =", "tests": "assert x", "match": "code"}\n')
    tasks = {"path": task, "max_new_tokens": 4}
    text = {"path": tmp_path / "text.jsonl"}
    write_jsonl(text["path"], documents(4, seed=1))
    with pytest.raises(ConfigError, match=r"code\.jsonl has programs to run .*set eval\.tasks\.run_code = true"):
        resolve_run(tiny_spec(assets, tmp_path, records=16, eval=text | {"tasks": tasks}))
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "?"}], "answer": "a"}\n')
    with pytest.raises(InputError, match=r"chats\.jsonl holds messages, .*set student\.chat_template"):
        resolve_run(tiny_spec(assets, tmp_path, records=16, eval=text | {"tasks": tasks | {"path": chats}}))
    spec = tiny_spec(assets, tmp_path, records=16, eval=text | {"tasks": tasks | {"run_code": True}})
    monkeypatch.setattr(run_code, "_ISOLATED", ("unshare", "--no-such-namespace"))
    with pytest.raises(ConfigError, match="code cannot be isolated here"):
        resolve_run(spec)
    monkeypatch.setattr(run_code, "_run", lambda program: (run_code.code_child.DONE, ""))
    resolve_run(spec)


def test_a_checkpoint_of_another_run_is_refused(assets: TinyAssets, tmp_path: Path, refusal: Refusal) -> None:
    from xtoken_services.common.run.resolve import resolve_run
    from xtoken_services.trainer.checkpoint import Checkpoints, Cursor

    spec = tiny_spec(assets, tmp_path, records=16)
    checkpoints = Checkpoints(spec.output / "checkpoints", resolve_run(spec))
    checkpoints.save(Cursor(step=1), {"w": torch.ones(1)})
    checkpoints.wait()
    raw = json.loads(spec.model_dump_json())
    raw["seed"] = 8
    record = spec.output / "run.json"
    record.write_text('{"state": "completed"}')
    line = refusal("run", str(write_run(tmp_path, raw)))
    assert "belongs to another run" in line
    assert "seed" in line
    assert record.read_text() == '{"state": "completed"}', "what the other run has left stays as it is"
