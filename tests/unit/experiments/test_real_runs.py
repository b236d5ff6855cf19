"""The experiment on real models: its run files are valid, its summary is that of hand-made curves."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from experiments import jobs
from experiments.real import controls, overview, page, predictions, results, stages, summary, tasks
from experiments.real.methods import CONDITIONS, CONTINUED, GEMMA3, METHODS, RATES, SMOLLM2, Cell, cells, job
from experiments.real.models import MissingSourceError
from experiments.real.page import RESULT
from tests.support.tiny_run import documents, make_model, write_jsonl
from xtoken_core.config.spec import parse_run_spec
from xtoken_core.tasks import read_prompts
from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer

PLANNED = list(cells(tuple(CONDITIONS), tuple(METHODS), (), (0, 1)))


@pytest.mark.parametrize("method", METHODS)
def test_run_files_are_valid(method: str) -> None:
    for cell in (cell for cell in PLANNED if cell.method == method):
        spec = parse_run_spec(tomllib.loads(job(cell).file), source=cell.name)
        assert spec.loss.kl_loss_weight == METHODS[method].weights[cell.weight][0]
        assert f"{CONDITIONS[cell.condition].source}.test" in spec.eval.also_by_name


def test_every_run_has_a_name_of_its_own() -> None:
    assert len({cell.name for cell in PLANNED}) == len(PLANNED)


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


def test_accuracy_is_that_of_the_best_step() -> None:
    found = result(("ce", 1e-4, 0, curve((0, 2.0, 2.0), (10, 1.5, 1.6), (20, 1.6, 1.2))))
    found["conditions"]["de-500k"] = {**found["conditions"]["de-500k"], "tasks": ["sums"]}
    for row, accuracy in zip(found["runs"][0]["curve"], (0.1, 0.25, 0.3), strict=True):
        row["task_accuracy_sums"] = accuracy
    lines = summary.accuracies(found, "de-500k", {}).splitlines()
    assert lines[2:] == ["| the student before training | 10.0% |", "| ce | 25.0% |"]


def test_task_prompts_do_not_hold_their_answers(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "handbook-de.test.jsonl", texts := ["eins zwei drei " * 20 + f"{name} Ende" for name in
        ("Rechner", "Speicher")])  # fmt: skip
    tasks.write_tasks(tmp_path)
    words = read_prompts(tmp_path / "next-word-de.jsonl", "exact", 10, within=None)
    assert {prompt.answers[0] for prompt in words} == {"Rechner", "Speicher"} and len(texts) == len(words)
    solved = read_prompts(tmp_path / "sums.jsonl", "exact", 10, within=None)
    assert all(prompt.match == "number" for prompt in solved)


def test_gains_are_paired_by_seed() -> None:
    found = result(
        ("ce", 1e-4, 0, curve((0, 1.5, 1.5))), ("ce", 1e-4, 1, curve((0, 1.7, 1.7))),
        ("chain", 1e-4, 0, curve((0, 1.3, 1.3))), ("chain", 1e-4, 1, curve((0, 1.6, 1.6))),
    )  # fmt: skip
    first, second = summary.table(found, "de-500k")
    assert (first.method, second.method) == ("chain", "ce")
    assert first.gain == pytest.approx(0.15)
    assert first.gain_deviation == pytest.approx(0.1 / 2**0.5)
    assert first.closed == pytest.approx(0.15 / 0.6)
    assert "| chain | ce | 2 | 1.450 ± 0.212 | +0.150 ± 0.071 | +0.200 | 25% |" in summary.markdown(
        found, "de-500k", {}
    )


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


def test_a_sample_is_drawn_by_the_seed_up_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "handbook-de.train.jsonl", texts := documents(60, seed=1))
    small = CONDITIONS["de-500k"].__class__(SMOLLM2, GEMMA3, "handbook-de", 1000, ())
    monkeypatch.setitem(CONDITIONS, "de-500k", small)
    drawn = []
    for seed in (0, 1):
        cell = Cell("de-500k", "ce", "ce", RATES[0], seed)
        stages.write_sample(tmp_path, cell)
        drawn.append([json.loads(line)["text"] for line in (tmp_path / cell.text).read_text().splitlines()])
    for sample in drawn:
        sizes = [len(text.encode()) for text in sample]
        assert sum(sizes[:-1]) < 1000 <= sum(sizes)
        assert set(sample) <= set(texts)
    assert drawn[0] != drawn[1]


def write_run(state: Path, cell: Cell, bits: float, *, start: float = 1.9) -> None:
    run = state / "runs" / cell.name
    run.mkdir(parents=True)
    write_jsonl_rows(run / "steps.jsonl", [{"step": 1, "tokens": 9}])
    write_jsonl_rows(run / "eval.jsonl", [{"step": 0, "bits_per_byte": start}, {"step": 1, "bits_per_byte": bits}])
    (run / "summary.json").write_text("{}")


def test_rows_stay_when_their_run_directories_are_gone(tmp_path: Path) -> None:
    planned = list(cells(("de-500k",), ("ce", "chain"), ("even",), (0,)))
    out, gone, here = tmp_path / "real.json", tmp_path / "gone", tmp_path / "here"
    for cell in planned[:4]:
        write_run(gone, cell, 1.5)
    (gone / "teacher-de-500k.json").write_text('{"bits_per_byte": 1.1}')
    before = stages.collect(gone, planned, out)
    assert [results.cell_of(row) for row in before["not_run"]] == planned[4:]
    for cell in planned[3:5]:
        write_run(here, cell, 1.25)
    after = stages.collect(here, planned, out)
    assert [results.cell_of(row) for row in after["runs"]] == planned[:5]
    assert [row["curve"][-1]["bits_per_byte"] for row in after["runs"]] == [1.5, 1.5, 1.5, 1.25, 1.25]
    assert [results.cell_of(row) for row in after["not_run"]] == planned[5:]
    assert after["teachers"] == {"de-500k": {"bits_per_byte": 1.1}}
    assert json.loads(out.read_text()) == json.loads(json.dumps(after))


def test_rows_of_two_machines_have_one_description() -> None:
    known, found = results.read_result(Path("none")), results.read_result(Path("none"))
    known["machine"] = {"gpus": [], "cpus": "2 to 8", "torch": "2.11"}
    found["machine"] = {"gpus": ["A"], "cpus": 32, "torch": "2.13"}
    joined = results.merged(known, found)["machine"]
    assert joined == {"gpus": ["A"], "cpus": "2 to 32", "torch": "2.11 or 2.13"}
    assert results.merged(known | {"machine": joined}, found)["machine"] == joined


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


def test_a_sweep_that_was_begun_is_listed_as_not_run_and_no_outcome() -> None:
    one = Cell("de-500k", "gold", "even", RATES[1], 0)
    row = {**vars(one), "curve": curve((0, 1.5, 1.5))}
    found = {"machine": {}, "conditions": {"de-500k": None}, "teachers": {}, "runs": [row], "not_run": []}
    known = results.merged(found, {**found, "runs": []})
    assert {each["rate"] for each in known["not_run"]} == {RATES[0], RATES[2]}
    assert summary.outcomes(known) == []
    assert [(each.method, each.rates) for each in summary.partial_sweeps(known, "de-500k")] == [("gold", (RATES[1],))]


def test_the_committed_result_file_is_as_a_merge_leaves_it() -> None:
    known = results.read_result(RESULT)
    nothing = results.read_result(Path("none"))
    assert json.loads(json.dumps(results.merged(known, nothing))) == known


def test_pages_show_conditions_whose_teacher_was_not_measured() -> None:
    known = results.read_result(RESULT)
    del known["teachers"]["chat-500k-small-rates"]
    text = page.page(known)
    assert "| chat-en, 0.5 MB, exchanged, smaller rates |  | " in text


def test_the_page_says_what_a_fitting_rate_leaves_of_a_gain() -> None:
    known = results.read_result(RESULT)
    text = overview.fitted_rates(known)
    for name in overview.SWEPT:
        for row in summary.table(known, name):
            assert (f"{row.gain:+.3f}" in text) or row.method != summary.DEFAULT
            assert (f"{row.test:.3f}" in text) or row.method != summary.BASELINE
    assert text in page.page(known)
    usual = [run for run in known["runs"] if run["condition"] != overview.SWEPT[1]]
    assert overview.fitted_rates(known | {"runs": usual}) == ""


def test_the_overview_shows_the_default_with_the_weights_that_the_library_sets() -> None:
    bits = {("ce", "ce"): 1.5, ("chain", "even"): 1.3, ("chain_fading", "even"): 1.3, ("chain_fading", "strong"): 1.2}
    runs = [
        {**vars(Cell("de-500k", method, weight, rate, 0)), "curve": curve((9, value, value)), "metrics": {}}
        for (method, weight), value in bits.items()
        for rate in RATES
    ]
    known = {
        "conditions": {"de-500k": vars(CONDITIONS["de-500k"])},
        "teachers": {},
        "runs": runs,
        "not_run": [],
    }
    assert summary.chosen(summary.outcomes(known), 0)["de-500k", "chain_fading"] == "strong"
    assert "| 1.500 | 1.300 | **+0.200** |" in overview.table(known)


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (-0.05, "**The default loss, chain that fades, is worse than cross-entropy** by 0.050 bits per byte"),
        (0.005, "On every text we trained on, the default loss was at least as good on the test split as "
                "cross-entropy. Its gain is within the noise of 0.01 bits per byte on manual-de, 2 MB."),
        (0.05, "On every text we trained on, the default loss was at least as good on the test split as "
               "cross-entropy."),
    ],
)  # fmt: skip
def test_the_page_begins_with_where_the_default_gains_nothing(gain: float, said: str) -> None:
    names = ("ce", "chain", "chain_fading")
    cells = [Cell("de-2m", name, METHODS[name].first_weight, RATES[1], 0) for name in names]
    bits = (1.0, 0.9, 1.0 - gain)
    runs = [
        {**vars(cell), "curve": [{"step": 9, "bits_per_byte": value, "bits_per_byte_manual-de.test": value}]}
        for cell, value in zip(cells, bits, strict=True)
    ]
    known = {"conditions": {"de-2m": vars(CONDITIONS["de-2m"])}, "teachers": {}, "runs": runs, "not_run": []}
    assert overview.worse(known).splitlines()[0].startswith(said)
    assert "forgets" not in overview.worse(known)
    for key, low in (("bits_per_byte", 0.9), ("bits_per_byte_handbook-en.test", 2.0)):
        for run in known["runs"]:
            run["curve"] = [row | {key: low + 0.02 * (run["method"] == "chain_fading")} for row in run["curve"]]
    text = overview.worse(known)
    assert ("**On validation it is worse** by 0.020 on manual-de, 2 MB." in text) == (gain > 0)
    assert "it forgets more of other text**, in bits per byte after manual-de, 2 MB: handbook-en 0.020." in text
    assert ("within the noise" in overview.worse(known)) == (abs(gain) < overview.NOISE)


def write_jsonl_rows(file: Path, rows: list[dict[str, float]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_runs_are_spread_over_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.sys, "executable", str(tmp_path / "printer"))
    (tmp_path / "printer").write_text('#!/bin/sh\necho "gpu $CUDA_VISIBLE_DEVICES"; sleep 2\n')
    (tmp_path / "printer").chmod(0o755)
    wanted = [jobs.Job(name, "") for name in ("a", "b", "c")]
    ended: list[None] = []
    jobs.run_all(
        tmp_path, wanted, side_by_side=3, until=time.monotonic() + 300, gpus=2, on_end=lambda: ended.append(None)
    )
    assert len(ended) == 3
    logs = [(tmp_path / f"{job.name}.log").read_text() for job in wanted]
    assert logs == ["gpu 0\n", "gpu 1\n", "gpu 0\n"]


def test_missing_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingSourceError, match="run the stage `models` first"):
        stages.runs(tmp_path, PLANNED[:1], side_by_side=1, until=0.0, device="cpu", steps=1)


@pytest.mark.parametrize(
    ("condition", "method", "missing"),
    [("de-500k", "same", CONTINUED), ("de-500k", "samples", "samples.s0.jsonl"), ("chat-500k", "ce", "chat-en.train")],
)
def test_materials_of_controls_are_made_by_their_stage(
    tmp_path: Path, condition: str, method: str, missing: str
) -> None:
    for name in (SMOLLM2, GEMMA3):
        train_student_tokenizer(documents(40, seed=1), tmp_path / "models" / name, vocabulary=300)
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts" / "handbook-de.train.jsonl", documents(4, seed=1))
    planned = [Cell(condition, method, "even", RATES[0], 0)]
    with pytest.raises(MissingSourceError, match=f"{missing}.*run the stage `controls` first"):
        stages.runs(tmp_path, planned, side_by_side=1, until=0.0, device="cpu", steps=1)


def test_questions_quote_every_document_once_a_round() -> None:
    texts = [f"{number} " + "word " * 200 for number in range(4)]
    asked = controls.questions(texts)
    assert len(set(asked)) == len(asked) == len(texts) * len(controls.QUESTIONS)
    assert all(len(question) < controls.EXCERPT_CHARACTERS + 100 for question in asked)


@pytest.mark.slow
def test_runs_are_made_and_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents(200, seed=1)
    for train, name in ((train_student_tokenizer, SMOLLM2), (train_teacher_tokenizer, GEMMA3)):
        train(texts, tmp_path / "models" / name, vocabulary=420)
        make_model(tmp_path / "models" / name, seed=0, extra_rows=0)
    for source in ("handbook-de", *CONDITIONS["de-500k"].others):
        for split in ("train", "validation", "test"):
            (tmp_path / "texts").mkdir(exist_ok=True)
            write_jsonl(tmp_path / "texts" / f"{source}.{split}.jsonl", documents(40, seed=len(source + split)))
    methods = ("ce", "chain", "same", "samples")
    planned = [cell for cell in cells(("de-500k",), methods, ("even",), (0,)) if cell.rate == RATES[0]]
    monkeypatch.setattr(controls, "CONTINUED_STEPS", 4)
    assert stages.make_controls(tmp_path, planned, until=float("inf"), device="cpu")
    assert stages.runs(tmp_path, planned, side_by_side=2, until=float("inf"), device="cpu", steps=6)
    stages.teachers(tmp_path, ["de-500k"], "cpu", tmp_path / "real.json")
    found = stages.collect(tmp_path, planned, tmp_path / "real.json")
    assert len(found["runs"]) == len(planned)
    assert {row["rate"] for row in found["not_run"]} == set(RATES[1:])
    assert {row.method for row in summary.partial_sweeps(found, "de-500k")} == set(methods)
    assert set(found["teachers"]) == {"de-500k", "de-500k-same"}
    assert json.loads((tmp_path / "real.json").read_text()) == json.loads(json.dumps(found))


def test_partial_sweeps_are_compared_at_their_rates() -> None:
    found = result(
        ("ce", 1e-4, 0, curve((0, 1.5, 1.5))), ("ce", 2e-4, 0, curve((0, 1.4, 1.4))),
        ("gold", 1e-4, 0, curve((0, 1.6, 1.7))), ("gold", 1e-4, 1, curve((0, 1.0, 1.0))),
    )  # fmt: skip
    found["not_run"] = [{"condition": "de-500k", "method": "gold", "weight": "ce", "rate": 2e-4, "seed": 0}]
    (row,) = summary.partial_sweeps(found, "de-500k")
    assert (row.method, row.rates, row.test) == ("gold", (1e-4,), 1.7)
    assert row.below == {"ce": pytest.approx(-0.2), "chain": None}
    assert {row.method for row in summary.table(found, "de-500k") if row.first_gain is not None} == {"ce"}
