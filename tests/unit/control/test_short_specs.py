"""Specifications without what models, text and machine decide: completed as run files, by the API and by the page."""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from tests.unit.control.stored_runs import put, spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.run.defaults import fill_run_defaults
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.run_text import to_toml, without_defaults
from xtoken_services.common.text.training_text import open_held_out, open_text
from xtoken_services.control.api.short_specs import complete, start_short
from xtoken_services.control.runs import Runs
from xtoken_services.control.web.compare_page import differing_settings


@pytest.fixture
def short(tmp_path: Path, runs: Runs) -> dict[str, Any]:
    """A specification of three lines, over a text and two models without weights."""
    data = tmp_path / "data"
    for name, longest in (("student", 48), ("teacher", 4096)):
        (data / name).mkdir()
        (data / name / "config.json").write_text(json.dumps({"max_position_embeddings": longest}))
    (data / "text.txt").write_text("".join(f"line {number}\n" for number in range(400)))
    (data / "few.txt").write_text("one\n")
    models = {name: {"model": str(data / name)} for name in ("student", "teacher")}
    return {**models, "data": {"path": str(data / "text.txt")}}


def test_completed_as_a_run_file(runs: Runs, short: dict[str, Any], tmp_path: Path) -> None:
    completed, notes = complete(runs, short)
    document = {**short, "output": str(tmp_path / "runs" / "run")}
    assert completed == fill_run_defaults(document, tmp_path, source="a file")[0]
    assert (completed.output, completed.student.context_length) == (tmp_path / "runs" / "run", 48)
    assert any(note.startswith("student.context_length = 48") for note in notes)
    assert completed.holds_back and completed.data.path == Path(short["data"]["path"])
    assert not completed.output.exists()


def test_a_run_with_the_settings_of_a_deleted_one(runs: Runs, short: dict[str, Any], tmp_path: Path) -> None:
    first, _ = complete(runs, short)
    fingerprint = open_text(first, 0).fingerprint
    like = {name: value for name, value in without_defaults(first).items() if name != "output"}
    shutil.rmtree(first.output)
    second, _ = complete(runs, like | {"name": "second", "seed": 3})
    assert open_text(second, 0).fingerprint == fingerprint and len(open_held_out(second)) > 0
    assert second.output == tmp_path / "runs" / "second"
    specs = {run.name: run.model_dump(mode="json") for run in (first, second)}
    assert differing_settings(specs) == {"seed": ["0", "3"]}


def test_the_next_free_directory(runs: Runs, short: dict[str, Any], tmp_path: Path) -> None:
    put(runs, "run")
    (tmp_path / "runs" / "run-2").mkdir()
    assert runs.free_output("run", create=True) == tmp_path / "runs" / "run-3"
    assert runs.free_output("run") == tmp_path / "runs" / "run-4"


def test_the_same_request_returns_the_same_run(runs: Runs, short: dict[str, Any], tmp_path: Path) -> None:
    put(runs, "run", key="k", digest=hashlib.sha256(json.dumps(short, sort_keys=True).encode()).hexdigest())
    run, row = start_short(runs, short, "k")
    assert run is None and row.id == "run" and not (tmp_path / "runs" / "run-2").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"student": {"model": "DATA/none"}}, InputError, "cannot read the student's model"),
        ({"data": {"path": "/etc/passwd"}}, ConfigError, "lies under none of"),
        ({"output": "/etc/out"}, ConfigError, "it must lie under"),
        (
            {"eval": {"every": 3}, "data": {"sources": [{"path": "DATA/text.txt"}]}},
            ValidationError,
            "eval.path: text is held back of a single data.path only",
        ),
        ({"eval": {"every": 3}, "data": {"path": "DATA/few.txt"}}, ConfigError, "eval.every is set"),
        ({"train": {"micro_batch_tokens": 16}}, ValidationError, "cannot hold one sample"),
        ({"student": {"model": "DATA/student", "tokenizer": "DATA/a.gguf"}}, ConfigError, "converts nothing"),
    ],
    ids=["no model", "text", "output", "sources", "evaluation", "context", "conversion"],
)
def test_a_refused_run_leaves_no_directory(
    runs: Runs, short: dict[str, Any], tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    change = json.loads(json.dumps(change).replace("DATA", str(tmp_path / "data")))
    with pytest.raises(error, match=message):
        start_short(runs, short | change, None)
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")] == []


def test_a_name_never_leads_outside_the_directory_of_runs(
    client: TestClient, short: dict[str, Any], tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    answer = client.post("/v1/runs", json=short | {"name": "../outside"})
    assert answer.status_code == 422 and "name" in answer.text
    assert sorted(tmp_path.rglob("*")) == before


SETTINGS_OF_NONE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "a constant weight": {"loss": {"kl_loss_weight_end": "none"}},
    "whole vocabularies": {"loss": {"vocab_topk": "none", "teacher_modes": ["none"]}, "train": {"grad_clip": "none"}},
    "the divergence alone": {"loss": {"ce_loss_scale": 0.0}},
    "completions": {"rollout": {"max_new_tokens": 4}},
}


@pytest.mark.parametrize("settings", SETTINGS_OF_NONE.values(), ids=SETTINGS_OF_NONE)
def test_settings_without_defaults_are_a_run_file_of_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    original = RunSpec.model_validate(spec(tmp_path, output=str(tmp_path / "out"), **settings))
    text = to_toml(without_defaults(original))
    again, notes = fill_run_defaults(
        tomllib.loads(text), tmp_path, source="a file", machine=Machine(8, gpu_bytes=80 << 30)
    )
    assert again == original and notes == []
