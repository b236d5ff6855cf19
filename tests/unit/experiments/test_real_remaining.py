"""The runs that a result file lacks: which can start, in which order, and within which memory."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import jobs
from experiments.real import remaining
from experiments.real.__main__ import main
from experiments.real.methods import CHAT, CONDITIONS, CONTINUED, METHODS, RATES, Cell
from experiments.real.page import RESULT
from experiments.real.results import cell_of, rates_of, read_result
from experiments.real.stages import teachers
from tests.unit.experiments.test_real_runs import write_run

START = 1.9
PEAK = 10 * 2**30
REPEATED = "chat-500k-small-rates"


def row(cell: Cell, bits: float) -> dict[str, Any]:
    curve = [{"step": 0, "bits_per_byte": START}, {"step": 9, "bits_per_byte": bits}]
    return {**vars(cell), "curve": curve, "steps": 9, "tokens": 9, "metrics": {"memory_peak_bytes": PEAK}}


def gold(weight: str, rate: float, seed: int = 0, condition: str = "de-500k") -> Cell:
    return Cell(condition, "gold", weight, rate, seed)


def write_known(file: Path, done: Sequence[tuple[Cell, float]], lacking: Sequence[Cell]) -> Path:
    content = {
        "machine": {},
        "conditions": {},
        "teachers": {},
        "runs": [row(*each) for each in done],
        "not_run": [vars(cell) for cell in lacking],
    }
    file.write_text(json.dumps(content))
    return file


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for name in ("models", "texts", "runs"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_weights_wait_for_rates_and_seeds_for_weights(state: Path) -> None:
    weights, planned = list(METHODS["gold"].weights), gold("even", RATES[0], 1)
    first = [gold("even", rate) for rate in RATES]
    lacking = [*first[1:], *(gold(weight, RATES[-1]) for weight in weights[1:]), planned]
    known = write_known(state / "known.json", [(first[0], 1.5)], lacking)
    assert remaining.remaining(state, known) == first[1:]
    write_run(state, first[1], 1.3)
    write_run(state, first[2], 1.4)
    others = [gold(weight, RATES[1]) for weight in weights[1:]]
    assert set(remaining.remaining(state, known)) == set(others)
    for cell, bits in zip(others, (1.2, 1.6), strict=True):
        write_run(state, cell, bits)
    assert remaining.remaining(state, known) == [gold(others[0].weight, RATES[1], 1)]


def test_long_runs_are_first_then_rates_and_repeated_conditions_last(state: Path) -> None:
    long = gold("even", CONDITIONS["de-6m"].rates[0], condition="de-6m")
    rate = gold("even", RATES[0])
    done = [(Cell("de-500k", "p_kl", "even", rate, 0), 1.5) for rate in RATES]
    weight = Cell("de-500k", "p_kl", "kd", RATES[0], 0)
    (state / "texts" / f"{CHAT}.test.jsonl").touch()
    smaller = [gold("even", rate, condition=REPEATED) for rate in CONDITIONS[REPEATED].rates]
    known = write_known(state / "known.json", done, [smaller[0], weight, rate, long])
    found = remaining.remaining(state, known)
    assert found == [long, *(gold("even", rate) for rate in RATES), weight, *smaller]


def test_runs_that_others_wait_for_are_before_those_that_nothing_follows(state: Path) -> None:
    """Two weights of BPM wait for its first ones; nothing waits for gold, whose place is before it otherwise."""
    done = [(Cell("de-500k", "bpm", "even", rate, 0), 1.5) for rate in RATES[1:]]
    first = Cell("de-500k", "bpm", "even", RATES[0], 0)
    waiting = [Cell("de-500k", "bpm", weight, RATES[1], 0) for weight in METHODS["bpm"].weights if weight != "even"]
    alone = gold("even", RATES[0], condition="de-100k")
    known = write_known(state / "known.json", done, [alone, first, *waiting])
    assert len(waiting) == 2
    assert [cell for cell in remaining.remaining(state, known) if cell.method == "bpm"] == [first]
    assert remaining.remaining(state, known)[0] == first


def test_what_needs_controls_waits_for_them(state: Path) -> None:
    same = Cell("de-500k", "same", "even", RATES[0], 0)
    samples = Cell("de-500k", "samples", "ce", RATES[0], 0)
    chat = Cell("chat-500k", "uld", "even", CONDITIONS["chat-500k"].rates[0], 0)
    known = write_known(state / "known.json", [], [same, samples, chat])
    assert remaining.remaining(state, known) == []
    asked = remaining.waiting_for_controls(state, known)
    assert {same, samples, chat} < set(asked)
    assert {cell.seed for cell in asked if cell.method == "samples"} == {0, 1, 2}
    (state / "models" / CONTINUED).mkdir()
    (state / "texts" / samples.text).touch()
    (state / "texts" / f"{CHAT}.test.jsonl").touch()
    assert {same, samples, chat} <= set(remaining.remaining(state, known))
    assert all(cell.seed for cell in remaining.waiting_for_controls(state, known))


def test_rows_of_methods_that_are_run_again_do_not_count(state: Path) -> None:
    done = [(gold("even", rate), 1.5) for rate in RATES]
    known = write_known(state / "known.json", done, [])
    assert remaining.remaining(state, known) == []
    assert remaining.remaining(state, known, again=["gold"]) == [cell for cell, _ in done]
    assert remaining.remaining(state, known, again=["de-500k"]) == [cell for cell, _ in done]
    assert remaining.remaining(state, known, again=["de-100k", "alm1"]) == []


def test_rows_that_are_collected_again_leave_the_result_file(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a text that was generated again begin elsewhere, and replace those of the earlier one."""
    first, second = (gold("even", rate, condition=REPEATED) for rate in CONDITIONS[REPEATED].rates)
    kept = gold("even", RATES[0])
    known = write_known(tmp_path / "known.json", [(first, 1.5), (second, 1.6), (kept, 1.5)], [])
    measured: dict[str, Any] = {REPEATED: {}, f"{REPEATED}-same": {}, "de-500k": {}}
    known.write_text(json.dumps(read_result(known) | {"teachers": measured}))
    write_run(state, first, 1.4, start=1.8)
    choice = ["--remaining", "--device", "cpu", "--out", str(known)]
    monkeypatch.setattr("experiments.real.stages.teachers", lambda *_: None)
    monkeypatch.setattr("experiments.real.__main__._print_tables", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["real", "--state", str(state), "collect", *choice])
    assert main() == 2, "other texts"
    monkeypatch.setattr("sys.argv", ["real", "--state", str(state), "collect", *choice, "--again", REPEATED])
    assert main() == 0
    result = read_result(known)
    assert {cell_of(row) for row in result["runs"]} == {first, kept}
    assert second in [cell_of(row) for row in result["not_run"]]
    assert list(result["teachers"]) == ["de-500k"]


def test_the_teacher_of_a_text_that_is_run_again_is_measured_again(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "known.json"
    known.write_text(json.dumps(read_result(known) | {"teachers": {REPEATED: {"bits_per_byte": 1.0}}}))
    monkeypatch.setattr("experiments.real.stages._measure_teacher", lambda *_: {"bits_per_byte": 2.0})
    teachers(state, [REPEATED], "cpu", known)
    assert not (state / f"teacher-{REPEATED}.json").exists()
    teachers(state, [REPEATED], "cpu", known, [REPEATED])
    assert json.loads((state / f"teacher-{REPEATED}.json").read_text()) == {"bits_per_byte": 2.0}


def test_the_result_file_leaves_only_runs_that_can_be_chosen(state: Path) -> None:
    """Every run that could start now has the weights and the rate that the rows of the result file choose."""
    rows = read_result(RESULT)["runs"]
    (state / "models" / CONTINUED).mkdir()
    for cell in remaining.remaining(state, RESULT):
        assert cell.rate in rates_of(cell.condition, cell.method, cell.weight, rows)
        assert cell not in [cell_of(each) for each in rows]


def test_memory_is_the_most_that_known_runs_took() -> None:
    found = remaining.memory_of([row(gold("even", rate), 1.5) for rate in RATES])
    assert found == {("gold", CONDITIONS["de-500k"].student): pytest.approx(16.0)}


RUNNER = """#!/bin/sh
name=$(basename $4 .toml)
echo start $name $CUDA_MPS_CLIENT_PRIORITY >> {log}
sleep 0.3
mkdir -p {runs}/$name && touch {runs}/$name/summary.json
echo end $name >> {log}
"""


@pytest.fixture
def log(state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runner = state / "runner"
    runner.write_text(RUNNER.format(log=state / "log", runs=state / "runs"))
    runner.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(runner))
    return state / "log"


def test_runs_on_one_gpu_keep_within_its_memory(state: Path, log: Path) -> None:
    wanted = [jobs.Job("large", "", gib=90.0), jobs.Job("other", "", gib=30.0), jobs.Job("huge", "", gib=500.0)]
    assert jobs.run_all(state, wanted, side_by_side=3, until=time.monotonic() + 60, gib=100.0, least_s=0.0)
    lines = [line.split()[:2] for line in log.read_text().splitlines()]
    assert [name for _, name in lines[::2]] == [name for _, name in lines[1::2]]
    assert {name for _, name in lines} == {"large", "other", "huge"}


def test_runs_can_import_the_losses_of_the_field(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    runner = state / "runner"
    body = f"import sys, experiments.losses\nassert '/elsewhere' in sys.path\nopen('{state}/runs/a/summary.json', 'w')"
    runner.write_text(f"#!{jobs.sys.executable}\n{body}\n")
    runner.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(runner))
    (state / "runs" / "a").mkdir()
    assert jobs.run_all(state, [jobs.Job("a", "")], side_by_side=1, until=time.monotonic() + 100, least_s=0.0)


def test_runs_that_become_known_while_others_finish_are_made(state: Path, log: Path) -> None:
    def offered() -> list[jobs.Job]:
        done = [name for name in "abc" if jobs.finished(state, name)]
        return [jobs.Job(name, "", low_priority=name != "a") for name in "abc"[len(done) : len(done) + 1]]

    assert jobs.run_all(state, offered, side_by_side=2, until=time.monotonic() + 60, least_s=0.0)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [line[1] for line in lines if line[0] == "start"] == ["a", "b", "c"]
    assert [line[2:] for line in lines if line[0] == "start"] == [[], ["1"], ["1"]]
