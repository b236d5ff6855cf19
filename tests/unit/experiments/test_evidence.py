"""The experiment with numerals: its page is in step with its results, its text and tokenizers are what it says."""

from __future__ import annotations

import dataclasses
import json
import random
import tomllib
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from experiments.digits import page, predictions, stages
from experiments.digits.compare import RESOLUTIONS, has_sign, mismatches
from experiments.digits.methods import METHODS, planned, run_file
from experiments.digits.settings import FULL, REDUCED, SCALES, Scale
from experiments.digits.summary import Summary
from experiments.digits.text import Texts, held_out_problems, read_texts, spoilt
from experiments.jobs import Job, run_all
from xtoken_core.config.spec import parse_run_spec

SMALL = dataclasses.replace(FULL, documents=300, teacher_vocabulary=400, student_words=360, problems=20)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("digits")
    stages.prepare(state, SMALL)
    return state


@pytest.mark.parametrize("name", [name for name in SCALES if (page.RESULTS / f"{name}.json").is_file()])
def test_every_planned_run_is_in_the_results_or_told_as_not_run(name: str) -> None:
    result = json.loads((page.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    told = [(run["method"], run["seed"]) for run in [*result["runs"], *result["not_run"]]]
    assert sorted(told) == sorted(planned(SCALES[name]))
    assert result["settings"] == json.loads(json.dumps(SCALES[name].plain()))


def test_remaining_runs_are_those_that_the_result_file_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages.recorded(SMALL, tmp_path) == frozenset()
    known = [{"method": name, "seed": seed} for name, seed in planned(SMALL)[1:-1]]
    (tmp_path / f"{SMALL.name}.json").write_text(json.dumps({"runs": known}), encoding="utf-8")
    made: list[str] = []

    def make(state: Path, jobs: list[Job], **options: object) -> bool:
        made.extend(job.name for job in jobs)
        return True

    monkeypatch.setattr(stages, "run_all", make)
    without = stages.recorded(SMALL, tmp_path)
    assert stages.runs(tmp_path, SMALL, side_by_side=1, until=0.0, only=(), seeds=(), without=without)
    assert made == [stages.run_name(*run) for run in (planned(SMALL)[0], planned(SMALL)[-1])]


def test_every_prediction_is_about_something_that_is_measured() -> None:
    found = tomllib.loads(predictions.FILE.read_text(encoding="utf-8"))["prediction"]
    assert found
    for one in found:
        assert {"low", "high"} & one.keys()
        assert {one[key] for key in ("method", "less") if key in one} <= METHODS.keys()
    full = Summary(json.loads((page.RESULTS / "full.json").read_text(encoding="utf-8")))
    ran = {name for name in METHODS if full.runs(name)}
    for one in found:
        if {one[key] for key in ("method", "less") if key in one} <= ran:
            assert predictions.measured(full, one)[0] is not None, one["says"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scale", [FULL, REDUCED], ids=lambda scale: scale.name)
def test_every_run_file_is_one(scale: Scale, name: str) -> None:
    spec = parse_run_spec(tomllib.loads(run_file(scale, name, 0)), source=name)
    assert len(spec.teacher) == len(METHODS[name].teachers)
    assert spec.loss.vocab_topk is None or not METHODS[name].full


def test_no_held_out_problem_is_in_the_text(prepared: Path) -> None:
    texts = Texts(prepared / "text")
    held = {p.question for some in held_out_problems(SMALL).values() for p in some}
    asked = {line.split("=")[0] + "=" for file in (texts.clean, texts.wrong, texts.more) for doc in read_texts(file)
             for line in doc.splitlines()}  # fmt: skip
    assert held
    assert not held & asked
    swapped = {f"{p.right}+{p.left}=" for some in held_out_problems(SMALL).values() for p in some if p.operator == "+"}
    assert not swapped & asked


def test_teachers_read_right_answers_and_students_a_quarter_of_wrong_ones(prepared: Path) -> None:
    shares = {}
    for file in (Texts(prepared / "text").clean, Texts(prepared / "text").wrong, Texts(prepared / "text").more):
        lines = [
            line for doc in read_texts(file) for line in doc.splitlines() if line and set(line) <= set("0123456789+-=")
        ]
        wrong = [line for line in lines if eval_line(line) is False]
        shares[file.stem] = len(wrong) / len(lines)
    assert shares["clean"] == 0
    assert abs(shares["wrong"] - SMALL.wrong) < 0.05
    assert abs(shares["more"] - SMALL.wrong) < 0.05


def eval_line(line: str) -> bool | None:
    question, _, answer = line.partition("=")
    for operator, sign in (("+", 1), ("-", -1)):
        left, found, right = question.partition(operator)
        if found and left.isdigit() and right.isdigit():
            return int(left) + sign * int(right) == int(answer)
    return None


def test_a_wrong_answer_is_wrong_and_no_number_begins_with_zero() -> None:
    rng = random.Random(0)
    for answer in [*range(120), *range(900, 1999, 7)]:
        for _ in range(5):
            text = spoilt(answer, rng)
            assert text != str(answer)
            assert len(text) == 1 or text[0] != "0"


def test_one_tokenizer_splits_numbers_and_the_other_keeps_them(prepared: Path) -> None:
    teacher, student = (AutoTokenizer.from_pretrained(prepared / stages.TOKENIZERS / n) for n in ("teacher", "student"))
    text = "123+7=130\n998+999=1997\n"
    assert teacher.tokenize(text)[:3] == ["1", "2", "3"]
    assert [t for t in student.tokenize(text) if t.isdigit()] == ["123", "7", "130", "998", "999", "199", "7"]
    assert all(student.tokenize(numeral) == [numeral] for numeral in SMALL.numerals)
    for tokenizer in (teacher, student):
        code = 'def f(x):\n    return x + "é" * 2024\n'
        assert tokenizer.decode(tokenizer(code, add_special_tokens=False)["input_ids"]) == code


def test_nothing_is_started_when_the_time_is_up(prepared: Path) -> None:
    assert not run_all(prepared, [Job("ce-0", "")], side_by_side=1, until=0.0)
    assert not (prepared / "ce-0.toml").exists()


def test_measurements_are_added_to_those_of_another_machine(tmp_path: Path) -> None:
    students = {"0": {"bits_per_byte": {"code": 2.0}, "exact_match": {"all": 0.5}}}
    there = {"method": "ce", "seed": 0, "exact_match": {"all": 0.6}}
    machine = {"gpus": [], "cpus": 64, "python": "3.9.1", "torch": "2.0", "transformers": "5.0"}
    known = {"students": students, "runs": [there], "teachers": {}, "mass": [], "machine": machine}
    out = tmp_path / "out"
    out.mkdir()
    (out / "reduced.json").write_text(json.dumps(known))
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "chain-0.json").write_text('{"exact_match": {"all": 0.7}}')
    (tmp_path / "measured" / "student-0.json").write_text(json.dumps(students["0"]))
    stages.collect(tmp_path, REDUCED, out)
    result = json.loads((out / "reduced.json").read_text())
    assert {(run["method"], run["exact_match"]["all"]) for run in result["runs"]} == {("ce", 0.6), ("chain", 0.7)}
    told = {(run["method"], run["seed"]) for run in [*result["runs"], *result["not_run"]]}
    assert told == set(planned(REDUCED)) and len(result["not_run"]) == len(told) - 2
    assert result["machine"]["cpus"].endswith(" to 64") and "2.0 or " in result["machine"]["torch"]


def test_measurements_from_other_first_students_are_refused(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    for right in (0.5, 0.6):
        student = {"bits_per_byte": {"code": 2.0}, "exact_match": {"all": right}}
        (tmp_path / "measured" / "student-0.json").write_text(json.dumps(student))
        if right == 0.5:
            stages.collect(tmp_path, REDUCED, tmp_path)
    kept = (tmp_path / "reduced.json").read_text()
    with pytest.raises(stages.OtherStudentsError, match=r"first student 0 has 0.6000 right answers"):
        stages.collect(tmp_path, REDUCED, tmp_path)
    assert (tmp_path / "reduced.json").read_text() == kept


def test_a_method_that_has_not_run_is_named_below_the_table() -> None:
    result = json.loads((page.RESULTS / "full.json").read_text(encoding="utf-8"))
    result["runs"] = [run for run in result["runs"] if run["method"] != "gold"]
    outcome = page.page(Summary(result)).partition("### Outcome")[2].partition("## The teacher's mass")[0]
    assert "| gold | 3 |" not in outcome and "| H-KL | 3 |" in outcome
    assert "Not run at this size, but at the [reduced one](#the-reduced-version): gold." in outcome
    assert page.lacking(Summary(result), Summary({})).startswith("Not run at all: gold.")
    assert page.lacking(Summary({}), Summary({})) == ""


@pytest.mark.parametrize(
    ("known", "again", "said"),
    [
        ([0.20, 0.22, 0.18], [0.19, 0.23, 0.21], []),
        ([0.20, 0.22, 0.18], [-0.02, -0.01, -0.03], ["the sign", "the mean"]),
        ([-0.20, -0.22, -0.18], [0.03, 0.0, -0.02], ["the sign", "the mean"]),
        ([-0.20, -0.22, -0.18], [-0.21, -0.2, -0.18], []),
        ([0.075, 0.0, 0.05], [0.012, 0.025, -0.113], []),
        ([0.20, 0.22, 0.18], [0.5, -0.1, 0.2], ["the spread"]),
    ],
)
def test_a_repetition_agrees_by_sign_and_spread(known: list[float], again: list[float], said: list[str]) -> None:
    found = mismatches(known, again, resolution=0.02)
    assert [line.partition(":")[0] for line in found] == said


def test_the_reduced_table_has_signs_for_the_slow_test_to_find_again() -> None:
    reduced = Summary(json.loads((page.RESULTS / "reduced.json").read_text(encoding="utf-8")))
    known = {measure: reduced.difference("p_kl", "ce", measure) for measure in RESOLUTIONS}
    signs = [measure for measure in RESOLUTIONS if has_sign(known[measure], resolution=RESOLUTIONS[measure])]
    assert len(signs) >= 2
