"""The form of a run: its fields and their conversion, path suggestions, errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.unit.control.stored_runs import spec
from xtoken_core.config.spec import RunSpec
from xtoken_services.control.web import form
from xtoken_services.control.web.fields import EXCLUDED, field_names, sections
from xtoken_services.control.web.loss_terms import MODES_OF_SETTING, OF_SEVERAL_TEACHERS


def full(tmp_path: Path) -> RunSpec:
    """A run with something in every part but `rollout`, which `train.lora` excludes."""
    return RunSpec.model_validate(
        spec(
            tmp_path,
            eval={
                "path": [tmp_path / "a.txt", tmp_path / "b.txt"],
                "every": 7,
                "tasks": {"path": tmp_path / "sums.jsonl", "match": "number"},
                "samples": {"prompts": ["one, two", "three"]},
            },
            loss={"vocab_topk": "none", "teacher_modes": ["gold", "none"]},
            train={"lora": {"targets": ["q_proj", "v_proj"]}, "learning_rate": 1.23456789e-5, "master_weights": False},
            teacher=[
                {"model": tmp_path / "t", "context_length": 9, "projection": tmp_path / 'odd "name" 日本 👍.pt'},
                {"model": tmp_path / "u", "context_length": 10, "projection": tmp_path / "p.pt"},
            ],
        )
    )


def on_policy(tmp_path: Path) -> RunSpec:
    rollout = {"stop": ["Q:", "A:"], "top_p": 0.9, "prompt_characters": 9, "max_new_tokens": 4}
    return RunSpec.model_validate(spec(tmp_path, rollout=rollout))


def test_form_has_every_setting(tmp_path: Path) -> None:
    def leaves(value: object, place: str = "") -> Iterator[str]:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                yield from leaves(item, f"{place}.{key}" if place else key)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from leaves(value[0], place)
        else:
            yield place

    fields = field_names() | set(EXCLUDED)
    runs = full(tmp_path), on_policy(tmp_path)
    named = {name for run in runs for name in leaves(run.model_dump(mode="json"))}
    assert named - {"rollout", "eval", "eval.tasks", "train.lora"} == fields
    assert all(field.help for section in sections().values() for field in section.fields)


def test_form_round_trip(tmp_path: Path) -> None:
    for run in (on_policy(tmp_path), full(tmp_path)):
        whole = run.model_dump(mode="json")
        short = form.without_defaults(run)
        for document in (whole, short):
            again = form.document_of(form.values_of(document))
            assert RunSpec.model_validate(again) == run
    assert tomllib.loads(form.to_toml(short))["teacher"][0]["projection"].endswith('odd "name" 日本 👍.pt')


def test_form_of_a_run_without_a_teacher(client: TestClient, tmp_path: Path) -> None:
    settings = spec(tmp_path) | {"teacher": []}
    values = form.values_of(settings)
    assert not RunSpec.model_validate(form.document_of(values)).teacher
    assert 'name="teacher.0.model"' in client.get("/runs/new").text
    removed = client.post("/runs/new", data=form.values_of(spec(tmp_path)) | {"action": "remove-0"})
    assert 'name="teacher.0.model"' not in removed.text and "cross-entropy alone" in removed.text
    added = client.post("/runs/new", data=values | {"action": "add"})
    assert 'name="teacher.0.model"' in added.text


def test_form_shows_the_settings_of_one_loss(client: TestClient, tmp_path: Path) -> None:
    names = {field.key for field in sections()["loss"].fields}
    assert names.issuperset(MODES_OF_SETTING) and names.issuperset(OF_SEVERAL_TEACHERS)
    values = form.values_of(spec(tmp_path, loss={"mode": "chain"}))
    page = client.post("/runs/new", data=values | {"action": "as-fields"}).text
    hidden = {
        name
        for opening, name in re.findall(r'<div class="field ([^>]*)>.*?name="loss\.(\w+)"', page, re.DOTALL)
        if "hidden" in opening
    }
    assert {"vocab_topk", "alm_temperature"} <= hidden and not hidden & {"mode", "chain_end_terms", "ce_loss_scale"}
    assert "teacher_aggregation" not in page, "there is one teacher"
    public = spec(tmp_path, loss={"mode": "p_kl"})
    unsent = {name: value for name, value in form.values_of(public).items() if "chain_" not in name}
    assert RunSpec.model_validate(form.document_of(unsent)).loss.chain_bare_space, "a hidden switch keeps its default"


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


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        pytest.param({"student.context_length": "many"}, "student.context_length", "valid integer", id="no-number"),
        pytest.param({"teacher.1.weight": "2"}, "teacher.1.model", "Required.", id="second-teacher"),
        pytest.param({"train.betas": "0.9"}, "train.betas", "Field required", id="half-a-pair"),
        pytest.param({"queue.block_size": "5"}, "queue.block_size", "must divide", id="two-parts-at-odds"),
        pytest.param({"loss.alm_temperature": "7"}, "loss.alm_temperature", "belongs to ALM", id="settings-at-odds"),
    ],
)
def test_errors_by_field(tmp_path: Path, change: dict[str, str], field: str, message: str) -> None:
    values = form.values_of(spec(tmp_path)) | change
    found, errors = form.validated(form.document_of(values))
    assert found is None
    assert list(errors) == [field]
    assert message in errors[field][0] or errors[field][0] == "Required."


def test_form_shows_validation_errors(client: TestClient, tmp_path: Path) -> None:
    values = form.values_of(spec(tmp_path)) | {"action": "start", "output": "/etc/out"}
    page = client.post("/runs/new", data=values).text
    assert re.search(r'id="f-output-error">[^<]*it must lie under', page)
    page = client.post("/runs/new", data=values | {"output": "fine"}).text
    assert 'role="alert"' in page and str(tmp_path / "data") in page, "its files are not there"
    assert client.get("/v1/runs").json()["runs"] == []


@pytest.mark.parametrize("action", ["start", "as-fields", "as-toml", "add", "remove-" + "9" * 5000])
@pytest.mark.parametrize("values", [
    {"teacher." + "9" * 5000 + ".model": "x"}, {"teacher.\u0663.model": "x"}, {"seed": "9" * 5000},
    {"mode": "toml", "toml": "a = " + "[" * 3000}, {"mode": "toml", "toml": "teacher = 5"},
    {"mode": "toml", "toml": "seed = 1e400"},
], ids=["many digits", "other digits", "number", "nested", "type", "infinity"])  # fmt: skip
def test_hostile_form(client: TestClient, values: dict[str, str], action: str) -> None:
    assert client.post("/runs/new", data={**values, "action": action}).status_code == 200


@pytest.mark.parametrize(
    "loss",
    [
        {"mode": "chain", "vocab_topk": 64},
        {"mode": "p_kl", "ce_loss_scale": 1.0},
        {"vocab_topk": 64},
        {"mode": "p_kl", "kl_loss_weight_end": 0.0},
        {"kl_loss_weight_end": "none"},
        {},
    ],
    ids=["chain-with-a-public-name", "p_kl-weighed-as-chain", "p_kl-by-its-name", "p_kl-fading", "constant", "default"],
)
def test_a_run_that_is_copied_has_the_same_loss(tmp_path: Path, loss: dict[str, Any]) -> None:
    original = RunSpec.model_validate(spec(tmp_path, loss=loss))
    copied = form.without_defaults(original)
    assert RunSpec.model_validate(copied).loss == original.loss
    assert RunSpec.model_validate(form.document_of(form.values_of(copied))).loss == original.loss


def test_a_copied_run_leaves_the_weight_at_the_end_to_what_decides_it(tmp_path: Path) -> None:
    for loss, pinned in (
        ({"temperature": 2.0}, None),
        ({"mode": "p_kl"}, None),
        ({"mode": "gold", "kl_loss_weight_end": 0.5}, 0.5),
    ):
        copied = form.without_defaults(RunSpec.model_validate(spec(tmp_path, loss=loss)))
        assert copied["loss"].get("kl_loss_weight_end") == pinned
