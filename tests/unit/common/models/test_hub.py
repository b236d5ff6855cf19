"""Models and texts of a Hub: a server of this machine stands in for it."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer, hub_server
from tests.unit.common.run.test_defaults import make_model
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.models.hub import fetch_inputs, hub_id
from xtoken_services.common.run.defaults import load_run
from xtoken_services.common.run.machine import Machine
from xtoken_services.supervisor.run_record import SPEC, write_json
from xtoken_services.trainer.export import hub_name
from xtoken_services.trainer.main import push_model

CPU = Machine(cores=2)
RUN = 'student = "org/small"\nteacher = "org/large@v2"\ndata = "org/text"\neval = "none"\n'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    source = tmp_path / "source"
    source.mkdir()
    make_model(source / "small", {"vocab_size": 90, "max_position_embeddings": 512})
    make_model(source / "large", {"vocab_size": 99, "max_position_embeddings": 512}, weights=128)
    for name in ("small", "large"):
        (source / name / "modeling_evil.py").write_text("raise SystemExit")
        (source / name / "pytorch_model.bin").write_bytes(b"pickle")
        (source / name / "tokenizer.json").write_text("{}")
    for name, text in (("data/train-0.jsonl", "one"), ("data/test-0.jsonl", "two"), ("README.md", "about")):
        file = source / "text" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": text}) + "\n")
    with hub_server() as server:
        server.add("models/org/small", source / "small")
        server.add("models/org/large", source / "large", "v2")
        server.add("datasets/org/text", source / "text")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        (tmp_path / "run.toml").write_text(RUN)
        yield server


def test_a_run_from_the_hub_is_pinned(hub: HubServer, tmp_path: Path) -> None:
    first, notes = load_run(tmp_path / "run.toml", machine=CPU)
    assert sorted(path.name for path in first.student.model.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert hub_name(first.student.model) == "org/small" and hub_name(first.teacher[0].model) == "org/large"
    assert [path.name for path in first.data.paths] == ["train-0.jsonl"]
    commit = hub.commits["models/org/small"]["main"]
    assert first.hub["org/small"] == commit and set(first.hub) == {"org/small", "org/large@v2", "datasets/org/text"}
    assert f"hub: org/small at commit {commit}" in notes
    first.output.mkdir(parents=True)
    write_json(first.output / SPEC, first.model_dump(mode="json"))

    (tmp_path / "source" / "small" / "config.json").write_text('{"vocab_size": 91}')
    assert hub.add("models/org/small", tmp_path / "source" / "small") != commit
    hub.requests.clear()
    assert load_run(tmp_path / "run.toml", machine=CPU)[0] == first
    assert hub.requests == []
    other, _ = load_run(tmp_path / "run.toml", ["output=other"], machine=CPU)
    assert other.hub["org/small"] == hub.commits["models/org/small"]["main"] != commit


def test_without_a_connection(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = load_run(tmp_path / "run.toml", machine=CPU)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert load_run(tmp_path / "run.toml", machine=CPU)[0] == first  # from the cache
    with pytest.raises(InputError, match=r"student\.model: org/other is no path here, .*cannot be fetched"):
        load_run(tmp_path / "run.toml", ["student.model=org/other"], machine=CPU)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("student.model=org/none", r"student\.model: org/none is no path here, .* does not exist, or is private"),
        ("student.model=org/small@v9", r"has no revision 'v9'"),
        ("data.path=org/text:*.parquet", r"data\.path: org/text on .* matches '\*\.parquet': it has README"),
        ("student.model=org/text", r"does not exist, or is private"),
    ],
)
def test_errors(hub: HubServer, tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_run(tmp_path / "run.toml", [setting], machine=CPU)


def test_paths_are_no_ids(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for value in ("models/studnet", "text.jsonl", "/a/b", "../a/b", "a/b/c", "a/b.jsonl", "model", "a/b:*.txt"):
        assert hub_id(value, tmp_path) is None
    repository = hub_id("org/text@v1:data/*.jsonl", tmp_path, data=True)
    assert repository is not None and (repository.repo, repository.revision, repository.files) == (
        "org/text",
        "v1",
        "data/*.jsonl",
    )
    assert hub_name(tmp_path) is None


def test_push(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    model = tmp_path / "source" / "small"
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    assert push_model(model, "me/distilled") == {"repo": "me/distilled", "commit": "a" * 40}
    assert hub.uploads["me/distilled"]["README.md"] == (model / "README.md").read_bytes()
    assert "config.json" in hub.uploads["me/distilled"]
    assert hub.tokens == {"Bearer hf_secret"}
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "error" in push_model(model, "me/distilled")


def test_push_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    run = RunSpec.model_validate(
        {"output": "out", "push_to": "me/x", "student": {"model": "m", "context_length": 8}, "data": {"path": "t.txt"}}
    )
    with pytest.raises(InputError, match="push_to = 'me/x' needs a token"):
        check_input_files(run)


@pytest.mark.slow
def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF and nothing else")
    document = {"student": {"model": "small.gguf"}}
    if importlib.util.find_spec("gguf") is None:
        with pytest.raises(InputError, match=r"small\.gguf is read by the package gguf: install it"):
            fetch_inputs(document, tmp_path, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=r"student\.model: cannot convert the GGUF file .*small\.gguf: "):
        fetch_inputs(document, tmp_path, {})
    assert list((tmp_path / "cache" / "xtoken" / "gguf").iterdir()) == []
