"""What a model's card says of its origin, for each kind of teacher."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cases import cases
from tests.support.runs import resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_services.trainer.checkpoint import Cursor
from xtoken_services.trainer.export import base_model, licence_of, model_card, position_counts


def card(
    directory: Path, teachers: list[dict[str, Any]], evaluations: Sequence[dict[str, Any]] = (), **changes: Any
) -> str:
    """Of a run that is over; a teacher has a projection unless it is set to None."""
    run = resolved_run(directory, teachers=len(teachers))
    raw = run.spec.model_dump()
    raw["teacher"] = [{**mine, **change} for mine, change in zip(raw["teacher"], teachers, strict=True)]
    own = run.student.tokenizer_fingerprint
    files = [
        side.model_copy(update={"tokenizer_fingerprint": own}) if change is SAME else side
        for side, change in zip(run.teachers, teachers, strict=True)
    ]
    spec = RunSpec.model_validate({**raw, **changes})
    run = run.model_copy(update={"spec": spec, "teachers": tuple(files)})
    return model_card(run, position_counts(run, Cursor(step=run.steps, trained=32)), evaluations, None)


OWN: dict[str, Any] = {}
SAME: dict[str, Any] = {"projection": None}


@cases(
    "teachers, names, loss",
    ([OWN], "`teacher-0`, with a tokenizer of its own.", "chain and cross-entropy"),
    ([SAME], "`teacher-0`.", "KL and cross-entropy"),
    ([OWN, OWN], "`teacher-0` and `teacher-1`, with tokenizers of their own.", "chain and cross-entropy"),
    ([SAME, SAME], "`teacher-0` and `teacher-1`.", "KL and cross-entropy"),
    (
        [SAME, OWN],
        "`teacher-0` and `teacher-1`, one of them with a tokenizer of its own.",
        "KL + chain and cross-entropy",
    ),
    ([OWN, SAME, OWN], "`teacher-2`, 2 of them with tokenizers of their own.", "chain + KL and cross-entropy"),
    ids=["own", "same", "both own", "both same", "mixed", "three"],
)
def test_teachers_and_loss_are_told_as_they_are(
    tmp_path: Path, teachers: list[dict[str, Any]], names: str, loss: str
) -> None:
    text = card(tmp_path, teachers)
    (told,) = [line for line in text.splitlines() if "distilled by xtoken" in line]
    assert told.endswith(names)
    course = "the divergence counts less once the student comes near the teacher on the text"
    assert f"- loss: {loss}, at temperature 1; {course}" in text
    assert text.count("same tokenizer") == teachers.count(SAME)
    assert text.count("own") == (1 if OWN in teachers else 0)


def test_a_mode_of_ones_own_is_told(tmp_path: Path) -> None:
    text = card(tmp_path, [OWN, SAME], loss={"gold_loss": True})
    assert "- loss: gold + KL and cross-entropy (weight 0.1), at temperature 1\n" in text


def test_a_weight_that_changes_is_stated_at_both_ends(tmp_path: Path) -> None:
    text = card(tmp_path, [OWN], loss={"kl_loss_weight": 2.0, "kl_loss_weight_end": 0.5})
    assert "- loss: chain (weight 2 to 0.5) and cross-entropy, at temperature 1\n" in text


def test_a_weight_that_ends_as_it_begins_is_stated_once(tmp_path: Path) -> None:
    text = card(tmp_path, [OWN], loss={"kl_loss_weight": 0.0, "kl_loss_weight_end": 0.0})
    assert "- loss: cross-entropy, at temperature 1\n" in text


def test_an_adaptive_weight_that_stayed_is_stated(tmp_path: Path) -> None:
    for size, said in (
        (1 << 16, "counts less once"),
        (1 << 15, "kept its weight 1: fewer than 64 KiB of held-out text"),
    ):
        row = {"step": 0, "bytes": size, "teacher_bits_per_byte": 1.0, "documents": 2}
        assert f"at temperature 1; the divergence {said}" in card(tmp_path, [OWN], [row], eval={"path": "held-out.txt"})


@pytest.mark.parametrize(("name", "bits"), [("fp8", 8), ("nf4", 4)])
def test_quantized_weights_are_stated(tmp_path: Path, name: str, bits: int) -> None:
    teacher = {"dtype": "bfloat16"}
    text = card(tmp_path, [{**teacher, "quantized": name}, teacher])
    assert f"- teacher: `teacher-0`, bfloat16, {bits}-bit weights, weight 1, projection" in text
    assert "- teacher: `teacher-1`, bfloat16, weight 1, projection" in text


@pytest.mark.parametrize("name", ["student", "no", "a: b", "1.5", "größer"])
def test_the_header_names_a_local_student_without_its_path(tmp_path: Path, name: str) -> None:
    text = card(tmp_path, [OWN], student={"model": tmp_path / name, "context_length": 64})
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["base_model"] == name
    assert header["tags"] == ["distillation", "xtoken"]


def test_an_id_of_the_hub_stays_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert base_model(Path("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert base_model(Path("Qwen/Qwen3-0.6B")) == "Qwen3-0.6B"
    assert base_model(Path("models/org/student")) == "student"
    assert base_model(Path("../student")) == "student"
    assert base_model(Path("/models/student")) == "student"
    snapshot = "hub/models--org--big/snapshots/" + "a" * 40
    assert base_model(tmp_path / snapshot) == "org/big"


def write_card(model: Path, text: str) -> None:
    model.mkdir()
    (model / "README.md").write_text(text)


def test_licences_are_those_of_the_models(tmp_path: Path) -> None:
    write_card(tmp_path / "student", "---\nlicense: apache-2.0\n---\n# A\nlicense: no\n")
    write_card(tmp_path / "teacher-0", "---\nlicense: other\nlicense_name: gemma\n---\n")
    text = card(tmp_path, [OWN])
    assert "- student `student`: apache-2.0\n- teacher `teacher-0`: gemma\n" in text
    assert "license" not in yaml.safe_load(text.split("---\n")[1])
    write_card(tmp_path / "teacher-1", "license: mit\n")
    (tmp_path / "teacher-1" / "config.json").write_text('{"license": "apache-2.0"}')
    assert licence_of(tmp_path / "teacher-1") == "apache-2.0"
    assert licence_of(tmp_path / "none") is None
    alone = card(tmp_path, [])
    assert yaml.safe_load(alone.split("---\n")[1])["license"] == "apache-2.0"


def test_a_card_has_no_path_of_this_machine(tmp_path: Path) -> None:
    text = card(tmp_path, [OWN, SAME], eval={"path": tmp_path / "heldout.jsonl"})
    assert str(tmp_path) not in text and "`data.jsonl`" in text
