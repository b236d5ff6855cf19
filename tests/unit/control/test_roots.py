"""What a worker may open: told by the control plane through its environment, looked at again at every opening."""

import typing
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from tests.unit.control.stored_runs import spec
from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.files.allowed_paths import URLS, VARIABLE, RefusedError, Roots, check_allowed
from xtoken_services.common.text.training_text import open_index
from xtoken_services.common.tokenizers.loading import load_tokenizer
from xtoken_services.control.validation import RUN_CODE, SpecValidator


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roots:
    for name in ("data", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret.txt").write_text("secret\n")
    found = Roots.of([tmp_path / "data"], [tmp_path / "runs"])
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


def test_worker_environment(roots: Roots) -> None:
    assert Roots.of_environment() == roots


def test_file_replaced_by_a_link(roots: Roots, tmp_path: Path) -> None:
    text = tmp_path / "data" / "text.txt"
    text.write_text("one\n")
    run = RunSpec.model_validate(spec(tmp_path, output=str(tmp_path / "runs" / "out"), data={"path": str(text)}))
    assert len(open_index(run, [text], "text")) == 1
    text.unlink()
    text.symlink_to(tmp_path / "secret.txt")
    with pytest.raises(RefusedError, match="lies under none of"):
        open_index(run, [text], "text")
    with pytest.raises(RefusedError):
        roots.check_run(run)


def test_link_within_a_model_directory(roots: Roots, tmp_path: Path) -> None:
    model = tmp_path / "data" / "model"
    (model / "inner").mkdir(parents=True)
    (model / "inner" / "tokenizer.json").symlink_to(tmp_path / "data" / "blob")
    check_allowed(model, "model")
    (model / "config.json").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(RefusedError, match="leads out of this control plane's roots"):
        load_tokenizer(model, "student")


def test_trainer_checks_the_projection(roots: Roots, tmp_path: Path) -> None:
    from xtoken_services.trainer.main import make_loss

    file = tmp_path / "data" / "projection.safetensors"
    file.symlink_to(tmp_path / "secret.txt")
    teacher = {"model": tmp_path / "data", "context_length": 8, "projection": file}
    run = RunSpec.model_validate(spec(tmp_path, output=str(tmp_path / "runs" / "out"), teacher=[teacher]))
    side = ResolvedModel(vocab_size=8, head_width=8, tokenizer_fingerprint="")
    resolved = ResolvedRun(
        spec=run, student=side, teachers=(side,), projection_fingerprints=("",), data_fingerprint="", records=1,
        positions=1,
    )  # fmt: skip
    with pytest.raises(RefusedError, match=r"teacher\.0\.projection: .* lies under none of"):
        make_loss(resolved, torch.device("cpu"))


def test_servers_that_are_not_allowed(roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = {"model": tmp_path / "data", "context_length": 8, "url": ["http://a:1", "http://b:1"]}
    output = str(tmp_path / "runs" / "out")
    run = RunSpec.model_validate(spec(tmp_path, output=output, teacher=[teacher], loss={"temperature": 1.0}))
    monkeypatch.setenv(URLS, "http://a:1/")
    with pytest.raises(RefusedError, match=r"teacher\.0\.url: http://b:1 is none of the servers"):
        roots.check_urls(run.teacher[0].url, "teacher.0.url")
    monkeypatch.setenv(URLS, "http://a:1, http://b:1")
    roots.check_urls(run.teacher[0].url, "teacher.0.url")


def test_code_runs_only_where_the_operator_lets_it(
    roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = {"tasks": {"path": str(tmp_path / "data" / "code.jsonl"), "run_code": True}}
    run = RunSpec.model_validate(spec(tmp_path, output=str(tmp_path / "runs" / "out"), eval=evaluation))
    for value in ("", "0"):
        monkeypatch.setenv(RUN_CODE, value)
        for validator in (SpecValidator(None, tmp_path / "runs"), SpecValidator(roots, tmp_path / "runs")):
            with pytest.raises(RefusedError, match=r"eval\.tasks\.run_code: .*its operator may set XTOKEN_RUN_CODE=1"):
                validator.validate(run)
    monkeypatch.setenv(RUN_CODE, "1")
    assert SpecValidator(roots, tmp_path / "runs").validate(run) == run


def test_read_and_write_roots(roots: Roots, tmp_path: Path) -> None:
    roots.check(tmp_path / "runs" / "other" / "model", "student.model")
    with pytest.raises(RefusedError, match="is written: it must lie below"):
        roots.check(tmp_path / "data" / "out", "output", write=True)


def test_no_roots_without_control_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert check_allowed(tmp_path / "anything", "x") == tmp_path / "anything"


def test_invalid_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        Roots.of([tmp_path / "none"], [])
    monkeypatch.setenv(VARIABLE, "/a:/b")
    with pytest.raises(ConfigError, match=VARIABLE):
        Roots.of_environment()


def texts_of(model: type[BaseModel], name: str = "") -> set[str]:
    """Fields of a specification that take free text."""
    found = set()
    for field, info in model.model_fields.items():
        for part in parts_of(info.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= texts_of(part, f"{name}{field}.")
            elif part is str:
                found.add(f"{name}{field}")
    return found


def parts_of(annotation: object) -> list[object]:
    if typing.get_origin(annotation) is typing.Literal:
        return []
    inner = [part for item in typing.get_args(annotation) for part in parts_of(item)]
    return inner or [annotation]


def test_every_path_of_a_specification_is_checked() -> None:
    """A new field that takes text must be looked at here: a path is a `Path`, which the roots hold."""
    assert texts_of(RunSpec) == {
        "name", "push_to", "hub", "data.field", "data.sources.field", "eval.field", "eval.samples",
        "train.lora.targets", "ray.address", "rollout.stop",
        "teacher.special_tokens", "teacher.name", "teacher.prompt", "data.sources.teachers",
        "teacher.store", "teacher.url",
        "teacher.url_model", "rollout.url", "rollout.url_model",
    }  # fmt: skip


def test_a_store_lies_within_the_roots(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    roots = Roots.of([root], [])
    roots.check_store(str(root / "store"), "teacher.0.store")
    for store in (str(tmp_path / "store"), "memory://store", f"file://{root}/store"):
        with pytest.raises(RefusedError, match=r"teacher\.0\.store: .* lies under none of this control plane's roots"):
            roots.check_store(store, "teacher.0.store")


def test_relative_paths_are_below_the_first_root_and_the_output_below_the_runs(roots: Roots, tmp_path: Path) -> None:
    model = {"model": "model", "context_length": 8}
    changes = {"student": model, "teacher": [model | {"store": "store"}], "data": {"path": ["a.txt", "/other.txt"]}}
    run = RunSpec.model_validate(spec(tmp_path, **changes, loss={"vocab_topk": None}))
    validator = SpecValidator(roots, tmp_path / "runs")
    with pytest.raises(RefusedError, match=r"data\.path\.1: /other\.txt lies under none of"):
        validator.validate(run)
    run = run.model_copy(update={"data": run.data.model_copy(update={"path": Path("a.txt")})})
    checked, data = validator.validate(run), tmp_path / "data"
    assert (checked.student.model, checked.data.path) == (data / "model", data / "a.txt")
    assert checked.teacher[0].store == str(data / "store") and checked.output == tmp_path / "runs" / "out"
    with pytest.raises(RefusedError, match=r"student\.model: model is relative"):
        SpecValidator(None, tmp_path / "runs").validate(run)
