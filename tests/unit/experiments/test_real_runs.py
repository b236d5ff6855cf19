"""The experiment on real models: its run files are valid, its summary is that of hand-made curves."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from experiments.real import adaptive, instructions, overview, page, plan, predictions, results, stages, summary
from experiments.real.methods import (
    CONDITIONS,
    GEMMA3,
    GERMAN_TEACHER,
    METHODS,
    PATIENCE,
    QWEN15,
    RATES,
    SMOLLM2,
    TWO_TEXTS,
    Cell,
    cells,
)
from experiments.real.page import RESULT
from experiments.real.run_files import job, student_of, teachers_of
from tests.support.tiny_run import documents, make_model, write_jsonl
from xtoken_core.config.spec import parse_run_spec
from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer
from xtoken_services.trainer.best import best_evaluation

PLANNED = list(cells(tuple(CONDITIONS), tuple(METHODS), (), (0, 1)))


@pytest.mark.parametrize("method", METHODS)
def test_run_files_are_valid(method: str) -> None:
    # Rates and seeds are numbers in the same places: one of each is enough.
    for cell in {(cell.condition, cell.weight): cell for cell in PLANNED if cell.method == method}.values():
        spec = parse_run_spec(tomllib.loads(job(cell).file), source=cell.name)
        assert spec.loss.kl_loss_weight == METHODS[method].weights[cell.weight][0]
        assert f"{CONDITIONS[cell.condition].source}.test" in spec.eval.also_by_name


def curve(*values: tuple[int, float, float]) -> list[dict[str, float]]:
    return [
        {"step": step, "bits_per_byte": valid, "bits_per_byte_handbook-de.test": test}
        for step, valid, test in values
    ]  # fmt: skip


def result(*runs: tuple[str, float, int, list[dict[str, float]]]) -> dict[str, Any]:
    return {
        "conditions": {"de-500k": vars(CONDITIONS["de-500k"])},
        "teachers": {"de-500k": {"bits_per_byte_handbook-de.test": 1.0}},
        "runs": [
            {"condition": "de-500k", "method": method, "weight": "ce", "rate": rate, "seed": seed, "curve": rows}
            for method, rate, seed, rows in runs
        ],
    }


def test_the_best_step_and_rate_of_validation_are_reported_on_test() -> None:
    found = result(
        ("ce", 1e-4, 0, curve((0, 2.0, 2.0), (10, 1.5, 1.6), (20, 1.6, 1.2))),
        ("ce", 2e-4, 0, curve((0, 2.0, 2.0), (10, 1.4, 1.7), (20, 1.9, 1.1))),
    )
    (best,) = summary.outcomes(found)
    assert (best.rate, best.step, best.bits["handbook-de.test"]) == (2e-4, 10, 1.7)


def test_other_seeds_count_at_the_rate_of_the_first() -> None:
    found = result(
        ("ce", 1e-4, 0, curve((0, 1.5, 1.5))), ("ce", 2e-4, 0, curve((0, 1.4, 1.4))),
        ("ce", 1e-4, 1, curve((0, 1.2, 1.2))), ("ce", 2e-4, 1, curve((0, 1.3, 1.3))),
        ("uld", 1e-4, 1, curve((0, 1.3, 1.3))),
    )  # fmt: skip
    assert [(each.rate, each.seed) for each in summary.outcomes(found)] == [(2e-4, 0), (2e-4, 1)]


INSTRUCTED = "- red\n- the river, blue"
CHECKED: list[tuple[str, Any, bool]] = [
    ("bullets", 2, True), ("bullets", 3, False), ("numbered", 2, False), ("include", "river", True),
    ("include", "rive", False), ("lower", "", True), ("commas", "", False), ("first", "red", True),
    ("first", "re", False), ("last", "River, blue", True), ("last", "red", False), ("words", 6, True),
    ("words", 5, False), ("sentences", 0, True), ("quoted", "", False), ("paragraphs", "***", False),
    ("json", ["a"], False),
]  # fmt: skip


def test_every_instruction_is_checked() -> None:
    for name, value, right in CHECKED:
        assert instructions.follows(INSTRUCTED, [[name, value]]) is right, (name, value)
    assert instructions.follows(' "Two. Sentences!" ', [["quoted", ""], ["sentences", 2]])
    assert instructions.follows("1. one\n2. two", [["numbered", 2]])
    assert instructions.follows("One.\n\n***\n\nTwo.", [["paragraphs", "***"]])
    fenced = '```json\n{"a": "x", "b": "y"}\n```'
    assert instructions.follows(fenced, [["json", ["a", "b"]]])
    for keys, text in ((["b", "a"], fenced), (["a"], '{"a": 1}'), (["a"], "a")):
        assert not instructions.follows(text, [["json", keys]])
    assert not instructions.follows(" ", [["lower", ""]])
    made = list(instructions.instructions(400))
    assert len({prompt for prompt, _ in made}) == 400
    assert {name for _, checks in made for name, _ in checks} == instructions.CHECKS.keys()


def test_gains_are_paired_by_seed() -> None:
    found = result(
        ("ce", 1e-4, 0, curve((0, 1.5, 1.5))), ("ce", 1e-4, 1, curve((0, 1.7, 1.7))),
        ("chain", 1e-4, 0, curve((0, 1.3, 1.3))), ("chain", 1e-4, 1, curve((0, 1.6, 1.6))),
    )  # fmt: skip
    first, second = summary.table(found, "de-500k")
    assert (first.method, second.method) == ("chain", "ce")
    assert first.gain == pytest.approx(0.15)
    assert first.gain_deviation == pytest.approx(0.1 / 2**0.5)
    assert "| chain | ce | 2 | 1.450 | +0.150 ± 0.071 |" in summary.markdown(found, "de-500k", {})


def test_weights_are_chosen_on_one_seed() -> None:
    found = result(("ce", 1e-4, 0, curve((0, 1.5, 1.0))), ("ce", 1e-4, 1, curve((0, 1.1, 1.0))))
    found["runs"][1]["weight"] = "kd"
    assert summary.chosen(summary.outcomes(found), 0) == {("de-500k", "ce"): "ce"}


def test_predictions_are_compared_seed_by_seed() -> None:
    found = result(
        ("ce", 1e-4, 0, curve((0, 1.5, 1.5))), ("ce", 1e-4, 1, curve((0, 1.7, 1.7))),
        ("chain", 1e-4, 0, curve((0, 1.3, 1.3))), ("chain", 1e-4, 1, curve((0, 1.69, 1.69))),
    )  # fmt: skip
    first, second, *rest = predictions.compare(found)
    assert first.endswith("| at most -0.04 | -0.105 (2) | as predicted |")
    assert second.endswith("| at most -0.06 | not run | |")
    assert all(row.count("|") == 6 for row in rest)


def test_figures_of_curves_are_the_share_of_the_way_the_steps_and_the_change_since_the_start() -> None:
    found = result(
        ("ce", 1e-4, 0, curve((0, 2.0, 2.0), (50, 1.7, 1.7), (100, 1.6, 1.5))),
        ("chain", 1e-4, 0, curve((0, 2.0, 2.0), (50, 1.6, 1.4), (100, 1.5, 1.6))),
        ("uld", 1e-4, 0, curve((0, 2.0, 2.0), (50, 1.4, 1.3), (100, 1.6, 1.9))),
    )  # fmt: skip

    def figure(method: str, less: object, **other: object) -> list[float]:
        asked = {"condition": "de-500k", "method": method, "less": less, **other}
        return predictions.differences(found, summary.outcomes(found), asked)

    assert figure("uld", "ce", figure="share") == [pytest.approx(0.2 / 0.5)]
    assert figure("chain", "ce", figure="steps") == [0.5]
    assert figure("ce", "uld", figure="steps") == [1.0]
    assert figure("ce", "chain", figure="begun") == [-0.5]
    assert figure("chain", ["ce", "uld"], rate=1e-4) == [pytest.approx(1.6 - 1.3)]
    assert figure("chain", ["ce", "uld"], rate=1e-4, last=True) == [pytest.approx(1.6 - 1.5)]
    assert figure("chain", "ce", rate=3e-4) == []


def test_planned_runs_are_made_in_order_as_their_models_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan.planned({"runs": []})
    assert len(planned) == len(set(planned))
    assert all(cell.rate in CONDITIONS[cell.condition].rates for cell in planned)
    offered: list[list[str]] = []
    monkeypatch.setattr(stages, "prepare", lambda state, cells: None)
    monkeypatch.setattr(stages, "run_all", lambda state, jobs, **_: [offered.append([job.name for job in jobs()])])
    (tmp_path / "texts").mkdir()
    for source in {source for cell in planned for source in cell.texts}:
        (tmp_path / "texts" / f"{source}.train.jsonl").touch()
    for name in (SMOLLM2, QWEN15):
        (tmp_path / "models" / name).mkdir(parents=True)
        stages.runs(tmp_path, planned, side_by_side=1, until=0.0, device="cpu", steps=None, partly=True)
    assert offered[0] == [
        cell.name
        for cell in planned
        if cell.method == "ce"
        and CONDITIONS[cell.condition].student == SMOLLM2
        and not CONDITIONS[cell.condition].start
    ]
    whole = {"", SMOLLM2, QWEN15}
    able = [
        cell
        for cell in planned
        if {Path(at).name for at in (*teachers_of(cell), CONDITIONS[cell.condition].student)} <= whole
    ]
    assert offered[1] == [cell.name for cell in able if not CONDITIONS[cell.condition].start]
    for cell in able:
        (tmp_path / student_of(cell)).mkdir(parents=True, exist_ok=True)
    stages.runs(tmp_path, planned, side_by_side=1, until=0.0, device="cpu", steps=None, partly=True)
    assert offered[2] == [cell.name for cell in able]


def write_run(state: Path, cell: Cell, bits: float, *, start: float = 1.9) -> None:
    run = state / "runs" / cell.name
    run.mkdir(parents=True)
    write_jsonl_rows(run / "steps.jsonl", [{"step": 1, "tokens": 9}])
    write_jsonl_rows(run / "eval.jsonl", [{"step": 0, "bits_per_byte": start}, {"step": 1, "bits_per_byte": bits}])
    (run / "summary.json").write_text("{}")


def test_rows_of_other_texts_are_refused(tmp_path: Path) -> None:
    planned = list(cells(("de-500k",), ("ce",), (), (0,)))
    write_run(tmp_path, planned[0], 1.5)
    stages.collect(tmp_path, planned, out := tmp_path / "real.json")
    kept = out.read_text()
    write_run(tmp_path, planned[1], 1.4)
    rows = [{"step": 0, "bits_per_byte": 1.8}, {"step": 1, "bits_per_byte": 1.4}]
    write_jsonl_rows(tmp_path / "runs" / planned[1].name / "eval.jsonl", rows)
    with pytest.raises(results.OtherTextError, match=r"begins at 1\.8000 bits_per_byte and the known runs"):
        stages.collect(tmp_path, planned, out)
    assert out.read_text() == kept


def test_known_runs_report_the_same_if_they_end_early() -> None:
    """Hold every curve of the result file against `eval.patience`: its best step on validation stays."""
    known = results.read_result(RESULT)["runs"]
    for run in known:
        best = min(run["curve"], key=lambda row: row["bits_per_byte"])
        for end in range(2, len(run["curve"]) + 1):
            rows = run["curve"][:end]
            found = best_evaluation(rows)
            if found is not None and found.evaluations_since >= PATIENCE:
                assert best in rows, results.cell_of(run).name
                break


@pytest.mark.parametrize("patience", [2, 3, 5, 8])
def test_the_table_of_early_ends_is_by_the_rule_of_a_run(patience: int) -> None:
    for run in results.read_result(adaptive.RESULT)["runs"]:
        rows = run["curve"]
        found = (best_evaluation(rows[:end]) for end in range(2, len(rows) + 1))
        ends = [n for n, best in enumerate(found, 1) if best is not None and best.evaluations_since >= patience]
        last = ends[0] if ends else len(rows) - 1
        least = min(row["bits_per_byte"] for row in rows[1 : last + 1])
        curve = [(row["step"], row["bits_per_byte"]) for row in rows[1:]]
        assert adaptive.end_of(curve, patience) == (rows[last]["step"], least)


def test_the_committed_result_file_is_as_a_merge_leaves_it() -> None:
    known = results.read_result(RESULT)
    nothing = results.read_result(Path("none"))
    assert json.loads(json.dumps(results.merged(known, nothing))) == known


def test_the_page_says_what_a_fitting_rate_leaves_of_a_gain() -> None:
    known = results.read_result(RESULT)
    swept = overview.compared(known)["swept"]
    shown = next(text for path, text in page.rendered().items() if path.name == "evidence-all.md")
    assert f"shrinks from {' to '.join(swept['gains'])}" in shown
    for name, ce, gain in zip(overview.SWEPT, swept["ce"], swept["gains"], strict=True):
        rows = {row.method: row for row in summary.table(known, name)}
        assert (ce, gain) == (rows[summary.BASELINE].test, summary.gain_cell(rows[summary.DEFAULT]))


def write_jsonl_rows(file: Path, rows: list[dict[str, float]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.slow
def test_runs_are_made_and_collected(tmp_path: Path) -> None:
    texts = documents(200, seed=1)
    for train, name in ((train_student_tokenizer, SMOLLM2), (train_teacher_tokenizer, GEMMA3)):
        train(texts, tmp_path / "models" / name, vocabulary=420)
        make_model(tmp_path / "models" / name, seed=0, extra_rows=0, positions=1024)
    for source in ("handbook-de", *CONDITIONS["de-500k"].others):
        for split in ("train", "validation", "test"):
            (tmp_path / "texts").mkdir(exist_ok=True)
            write_jsonl(tmp_path / "texts" / f"{source}.{split}.jsonl", documents(40, seed=len(source + split)))
    planned = [cell for cell in cells(("de-500k",), ("ce", "chain"), ("even",), (0,)) if cell.rate == RATES[0]]
    assert stages.runs(tmp_path, planned, side_by_side=2, until=float("inf"), device="cpu", steps=6)
    stages.teachers(tmp_path, ["de-500k"], "cpu", tmp_path / "real.json")
    found = stages.collect(tmp_path, planned, tmp_path / "real.json")
    assert len(found["runs"]) == len(planned)
    assert {row["rate"] for row in found["not_run"]} == set(RATES[1:])
    assert set(found["teachers"]) == {"de-500k"}
    assert json.loads((tmp_path / "real.json").read_text()) == json.loads(json.dumps(found))


@pytest.mark.slow
def test_two_teachers_are_made_and_teach_two_texts(tmp_path: Path) -> None:
    texts = documents(200, seed=1)
    for number, name in enumerate((SMOLLM2, GEMMA3, QWEN15)):
        train = train_teacher_tokenizer if number else train_student_tokenizer
        train(texts, tmp_path / "models" / name, vocabulary=400 + 20 * number)
        make_model(tmp_path / "models" / name, seed=number, extra_rows=0, positions=1024)
    for source in ("manual-de", *CONDITIONS[GERMAN_TEACHER].others):
        for split in ("train", "validation", "test"):
            (tmp_path / "texts").mkdir(exist_ok=True)
            write_jsonl(tmp_path / "texts" / f"{source}.{split}.jsonl", documents(40, seed=len(source + split)))
    first = [cell for cell in plan.planned({"runs": []}) if not cell.seed and cell.rate < 8e-4]
    planned = [
        cell for cell in first if cell.condition in (GERMAN_TEACHER, TWO_TEXTS) and cell.method != "chain_routed_twice"
    ]
    # Four runs read the teacher that the first one makes.
    assert stages.runs(tmp_path, planned, side_by_side=2, until=float("inf"), device="cpu", steps=4, partly=True)
    stages.teachers(tmp_path, [GERMAN_TEACHER], "cpu", tmp_path / "strong.json")
    found = stages.collect(tmp_path, planned, tmp_path / "strong.json")
    assert {results.cell_of(row) for row in found["runs"]} == set(planned)
    ends = {row["method"]: row["curve"][-1]["bits_per_byte"] for row in found["runs"]}
    assert len(set(ends.values())) == len(planned) == 5, "no two choices of teachers are the same"
    (routed,) = (cell for cell in planned if cell.method == "chain_routed")
    for line in (tmp_path / "runs" / routed.name / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert (step["samples_t0"], step["samples_t1"]) == (4, 8)
    assert sum("taught by" in line for line in adaptive.two_texts(found).splitlines()) == 4
