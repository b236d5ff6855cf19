"""The page of a new run: its settings and their errors, run files of other runs, path suggestions.

Specifications without what models, text and machine decide: completed as run files, by the API and by the page.
"""

import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from tests.support.cases import cases
from tests.unit.control.stored_runs import put, spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.run.defaults import fill_run_defaults
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.run_text import to_toml, without_defaults
from xtoken_services.common.text.training_text import open_held_out, open_text
from xtoken_services.control.api.short_specs import complete, read_document, start_short
from xtoken_services.control.runs import Runs
from xtoken_services.control.web.compare_page import differing_settings
from xtoken_services.control.web.new_run import FIELDS, START, errors_of, settings

SETTINGS_OF_NONE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "a constant weight": {"loss": {"kl_loss_weight_end": "none"}},
    "whole vocabularies": {"loss": {"vocab_topk": "none", "teacher_modes": ["none"]}, "train": {"grad_clip": "none"}},
    "the divergence alone": {"loss": {"ce_loss_scale": 0.0}},
    "chain with a public name": {"loss": {"mode": "chain", "vocab_topk": 64}},
    "P-KL weighed as chain": {"loss": {"mode": "p_kl", "ce_loss_scale": 1.0}},
    "P-KL by its name": {"loss": {"vocab_topk": 64}},
    "P-KL that fades": {"loss": {"mode": "p_kl", "kl_loss_weight_end": 0.0}},
    "completions": {"rollout": {"max_new_tokens": 4}},
    "completions with the values of other runs": {
        "rollout": {"teacher_temperature": 1.0, "max_new_tokens": 4},
        "train": {"learning_rate": 1e-4},
        "loss": {"mode": "chain", "beta": "none"},
    },
    "completions behind text alone": {
        "rollout": {"after": 0.5, "fraction": [0.5, 1.0], "max_new_tokens": 4},
        "loss": {"mode": "chain", "kl_loss_weight": 0.0, "kl_loss_weight_end": 1.0},
    },
    "a teacher that is the student, its weight adaptive": {
        "teacher": [{"model": "student", "context_length": 64}], "loss": {"kl_loss_weight_end": "adaptive"}
    },
}  # fmt: skip


def full(tmp_path: Path) -> RunSpec:
    """A run with something in every part but `rollout`, which `train.lora` excludes."""
    return RunSpec.model_validate(
        spec(
            tmp_path,
            eval={
                "path": [tmp_path / "a.txt", tmp_path / "b.txt"],
                "every": 7,
                "tasks": {"path": tmp_path / "sums.jsonl", "match": "number"},
                "samples": ["one, two", "three"],
            },
            loss={"vocab_topk": "none", "teacher_modes": ["gold", "none"]},
            train={"lora": {"targets": ["q_proj", "v_proj"]}, "learning_rate": 1.23456789e-5, "master_weights": False},
            teacher=[
                {"model": tmp_path / "t", "context_length": 9, "projection": tmp_path / 'odd "name" 日本 👍.pt'},
                {"model": tmp_path / "u", "context_length": 10, "prompt": {"file": tmp_path / "p.txt"}},
            ],
        )
    )


def on_policy(tmp_path: Path) -> RunSpec:
    rollout = {"stop": ["Q:", "A:"], "top_p": 0.9, "prompt_characters": 9, "max_new_tokens": 4}
    return RunSpec.model_validate(spec(tmp_path, rollout=rollout))


def test_settings_of_the_form(client: TestClient) -> None:
    assert len(FIELDS) <= 15 and {name.replace(".0.", ".") for name in FIELDS} <= settings().keys()
    assert all(setting["description"] for setting in settings().values())
    page = client.get("/runs/new").text
    assert re.findall(r'data-setting="([^"]+)"', page) == list(FIELDS)
    assert all(f'<dt class="mono">{name}' in page for name in settings())
    assert 'rollout.teacher_temperature <span class="faint">: 0.5; 1 where' in page, "not the default of its class"
    modes = re.search(r'data-setting="loss.mode".*?</select>', page, re.DOTALL)
    assert modes and 'value="p_kl">P-KL<' in modes[0] and "custom" not in modes[0]
    assert set(re.findall(r'data-paths="(\w+)"', page)) == {"models", "texts"}
    of_hub = [each for each in re.findall(r'class="help"[^>]*>(.*?)</p>', page, re.DOTALL) if "Hub" in each]
    assert len(of_hub) == 2 and all("<code>xtoken run</code> also takes" in each for each in of_hub), (
        "it takes paths only"
    )


def test_run_text_round_trip(tmp_path: Path) -> None:
    for run in (on_policy(tmp_path), full(tmp_path)):
        again = tomllib.loads(to_toml(without_defaults(run)))
        assert RunSpec.model_validate(again) == run
    assert again["teacher"][0]["projection"].endswith('odd "name" 日本 👍.pt')


def test_path_suggestions_stay_below_the_roots(client: TestClient, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "models" / "student").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", ".hidden"):
        (data / "models" / "student" / name).touch()
    (data / "german.jsonl").touch()
    (data / "link").symlink_to("/etc")

    def suggested(kind: str, text: str) -> list[str]:
        return client.get("/paths", params={"kind": kind, "text": text}).json()  # type: ignore[no-any-return]

    assert suggested("models", "stud") == [str(data / "models" / "student")]
    assert suggested("texts", f"{data}/g") == [str(data / "german.jsonl")]
    assert suggested("models", f"{data}/") == [
        str(data / "models" / "student"),
        f"{data}/german.jsonl",
        f"{data}/models/",
    ]
    for outside in ("/etc/", f"{data}/link/", f"{data}/../../", "\0"):
        assert not [path for path in suggested("texts", outside) if not path.startswith(str(tmp_path))]


@cases(
    "change, setting, message",
    pytest.param({"teacher": [{"model": "/m", "weight": "x"}]}, "teacher.0.weight", "valid number", id="no-number"),
    pytest.param({"teacher": [{"model": "/m"}, {"weight": 2}]}, "teacher.1.model", "required", id="second-teacher"),
    pytest.param({"student": {"model": "/m", "sise": 3}}, "student.sise", "there is no such field", id="unknown"),
    pytest.param({"train": {"betas": [0.9]}}, "train.betas", "required", id="half-a-pair"),
    pytest.param({"train": {"betas": [0.9, "x"]}}, "train.betas", "valid number", id="item"),
    pytest.param({"data": {"path": 3}}, "data.path", "it takes a path", id="union"),
    pytest.param({"queue": {"block_size": 5}}, "queue.block_size", "must divide", id="two-sections-at-odds"),
    pytest.param({"loss": {"alm_temperature": 7}}, "loss.alm_temperature", "belongs to ALM", id="settings-at-odds"),
)
def test_errors_by_setting(tmp_path: Path, change: dict[str, Any], setting: str, message: str) -> None:
    found, wrong = read_document({**spec(tmp_path), **change})
    errors = errors_of(wrong)
    assert found is None and list(errors) == [setting]
    assert message in errors[setting][0]


def test_errors_are_shown_beside_the_text(client: TestClient, tmp_path: Path) -> None:
    def submitted(action: str, **changes: Any) -> str:
        text = "# kept\n" + to_toml({**spec(tmp_path), **changes})
        page = client.post("/runs/new", data={"action": action, "toml": text}).text
        assert "# kept" in page and 'role="alert"' in page
        return page

    page = submitted("start", output="/etc/out")
    assert re.search(r'data-error="output">.*it must lie below', page)
    assert re.search(r'data-setting="output"[^>]*aria-invalid="true"', page)
    assert str(tmp_path / "data") in submitted("start", output="fine"), "its files are not there"
    assert "pushes nothing" in submitted("check", push_to="me/model")
    assert "runs no custom loss" in submitted("check", loss={"mode": "custom"})
    assert client.get("/v1/runs").json()["runs"] == []


def test_the_run_file_of_another_run(client: TestClient, runs: Runs) -> None:
    put(runs, "old-1")
    assert START.splitlines()[0] in client.get("/runs/new").text
    page = client.get("/runs/new?from=old-1").text
    text = re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)
    assert text and "[[teacher]]" in text[1] and "projection.pt" in text[1] and "output" not in text[1]
    assert client.get("/runs/new?from=nothing").status_code == 404


@pytest.mark.parametrize("action", ["start", "check", "9" * 5000])
@cases(
    "text",
    "",
    "\0",
    "a = " + "[" * 3000,
    "teacher = 5",
    "seed = 1e400",
    "seed = " + "9" * 5000,
    "a." * 20_000 + "a = 1",
    "x = 1\n" * 70_000,
    'name = "</textarea><script>alert(1)</script>"',
    ids=["empty", "control", "nested", "type", "infinity", "digits", "dots", "large", "markup"],
)
def test_hostile_text(client: TestClient, text: str, action: str) -> None:
    answer = client.post("/runs/new", data={"toml": text, "action": action})
    assert answer.status_code == 200 and 'role="alert"' in answer.text and "<script>alert" not in answer.text


def test_a_copied_run_leaves_the_weight_at_the_end_to_what_decides_it(tmp_path: Path) -> None:
    for loss, pinned in (
        ({"temperature": 2.0}, None),
        ({"mode": "p_kl"}, None),
        ({"mode": "gold", "kl_loss_weight_end": 0.5}, 0.5),
    ):
        copied = without_defaults(RunSpec.model_validate(spec(tmp_path, loss=loss)))
        assert copied["loss"].get("kl_loss_weight_end") == pinned and "learning_rate" not in copied["train"]


@pytest.fixture
def short(tmp_path: Path, runs: Runs) -> dict[str, Any]:
    """A specification of three lines, over a text and two models without weights."""
    data = tmp_path / "data"
    for name, longest in (("student", 48), ("teacher", 4096)):
        (data / name).mkdir()
        (data / name / "config.json").write_text(json.dumps({"max_position_embeddings": longest}))
        (data / name / "tokenizer.json").write_text("{}")
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


@cases(
    "change, error, message",
    ({"student": {"model": "DATA/none"}}, InputError, "cannot read the student's model"),
    ({"data": {"path": "/etc/passwd"}}, ConfigError, "lies under none of"),
    ({"output": "/etc/out"}, ConfigError, "it must lie below"),
    (
        {"eval": {"every": 3}, "data": {"sources": [{"path": "DATA/text.txt"}]}},
        ValidationError,
        "eval.path: text is held back of a single data.path only",
    ),
    ({"eval": {"every": 3}, "data": {"path": "DATA/few.txt"}}, ConfigError, "eval.every is set"),
    ({"train": {"micro_batch_tokens": 16}}, ValidationError, "cannot hold one sample"),
    ({"student": {"model": "DATA/student", "tokenizer": "DATA/a.gguf"}}, ConfigError, "converts nothing"),
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


@pytest.mark.parametrize("settings", SETTINGS_OF_NONE.values(), ids=SETTINGS_OF_NONE)
def test_settings_without_defaults_are_a_run_file_of_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    original = RunSpec.model_validate(spec(tmp_path, output=str(tmp_path / "out"), **settings))
    text = to_toml(without_defaults(original))
    again, notes = fill_run_defaults(
        tomllib.loads(text), tmp_path, source="a file", machine=Machine(8, gpu_bytes=80 << 30)
    )
    assert again == original and notes == []
