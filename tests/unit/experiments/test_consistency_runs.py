"""The consistency experiment's processes: results are kept as they come, a later call resumes, time is a limit."""

import json
import time

import pytest

from experiments.consistency.__main__ import CE, VARIANTS, by_need, run, stages_of
from experiments.consistency.parallel import measure_all


def test_descents_of_the_default_and_the_uncorrected_form_begin_first():
    tasks = [(name, stage) for name in (CE, *VARIANTS) for stage in stages_of(name)]
    ordered = by_need(tasks)
    assert sorted(ordered) == sorted(tasks)
    assert {name for name, _ in ordered[:4]} == {"chain", "chain + end terms + conditioning"}
    assert all(stage.startswith("near") for _, stage in ordered[:4])


@pytest.mark.slow
def test_a_later_call_measures_what_is_missing(tmp_path, capfd):
    assert not run([1], "tiny", 0, [CE], tmp_path, seconds=0.0)
    assert run([1], "tiny", 0, [CE], tmp_path)
    (path,) = tmp_path.iterdir()
    first = json.loads(path.read_text())
    assert first["losses"][CE]["near"]["final"] < 0.1 and first["losses"][CE]["cpu_seconds"] > 0
    del first["losses"][CE]["truth"]
    path.write_text(json.dumps(first))
    capfd.readouterr()
    assert run([1], "tiny", 0, [CE], tmp_path)
    assert capfd.readouterr().out.count(CE) == 1
    again = json.loads(path.read_text())
    assert again["losses"][CE]["near"] == first["losses"][CE]["near"] and "truth" in again["losses"][CE]


@pytest.mark.slow
def test_tasks_end_with_the_time_and_failures_stop_no_other(tmp_path):
    def prepare(number):
        def measure(name, stage):
            time.sleep(60.0 if name == "long" else 0.0)
            assert name != "failing"
            (tmp_path / f"{number} {name} {stage}").touch()

        return measure

    tasks = [("long", "a"), ("failing", "a"), ("short", "a"), ("short", "b")]
    began = time.monotonic()
    measure_all({1: tasks, 2: []}, prepare, jobs=2, seconds=3.0)
    assert time.monotonic() - began < 30.0
    assert {path.name for path in tmp_path.iterdir()} == {"1 short a", "1 short b"}
