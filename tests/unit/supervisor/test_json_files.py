"""Readers of JSON files that are being written, and the run's record."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticSerializationError

from xtoken_core.errors import InputError
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.json_files import read_json
from xtoken_services.supervisor.run_directory import sole_writer
from xtoken_services.supervisor.run_files import Curve
from xtoken_services.supervisor.run_record import RunRecord, read_record, write_record


def last_line(file: Path) -> dict[str, Any] | None:
    """Return the last line of a curve."""
    curve = Curve(file)
    curve.refresh()
    return curve.last


def test_last_complete_line_without_ids(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    rows = [{"step": n, "loss": n / 2, "ids": list(range(30_000))} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    assert last_line(file) == {"step": 2, "loss": 1.0}


def test_single_long_line(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps({"step": 0, "ids": list(range(30_000))}) + "\n")
    assert last_line(file) == {"step": 0}


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text('{"step": 0, "loss": NaN, "grad_norm": Infinity}\n')
    assert last_line(file) == {"step": 0, "loss": None, "grad_norm": None}


@pytest.mark.parametrize("text", [None, "", "torn", "no json\n", "[1]\n"])
def test_nothing_to_read(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "steps.jsonl"
    if text is not None:
        file.write_text(text)
    assert last_line(file) is None
    assert read_json(file) is None


def test_completions_of_the_first_steps_are_compared_with_those_of_the_last(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    curve = Curve(file)

    def after(*lines: dict[str, Any]) -> Any:
        with file.open("a") as steps:
            steps.writelines(json.dumps(line) + "\n" for line in lines)
        return curve.steps()["completions"]

    def step(at: int, **metrics: Any) -> dict[str, Any]:
        return {"step": at, "loss": 1.0} | ({"completions": 8, "entropy": at, **metrics} if at >= 4 else {})

    assert after() is None
    assert after(*map(step, range(11))) is None, "a cold start of 4 steps, and 7 with completions"
    start = {"entropy": 7.5, "finished": 0.5}
    assert after(step(11, finished=None)) == {"first": {"entropy": 7.5}, "last": {"entropy": 7.5}}
    assert after(*map(step, range(12, 40))) == {"first": {"entropy": 7.5}, "last": {"entropy": 35.5}}
    file.unlink()
    assert after(*(step(at, finished=0.5) for at in range(12))) == {"first": start, "last": start}, "a resume"


def test_the_best_evaluation_is_by_the_runs_settings(tmp_path: Path) -> None:
    rows = [(0, 3.0, 0.5), (1, 2.0, 0.3), (2, 2.5, 0.4)]
    lines = [{"step": step, "bits_per_byte": bits, "task_accuracy_a": right} for step, bits, right in rows]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = Curve(tmp_path / "eval.jsonl")
    assert curve.evaluations({})["best_evaluation"] == lines[1]
    assert curve.evaluations({"rollout": {"stop_when_worse": None}})["best_evaluation"] == lines[1]
    assert curve.evaluations({"rollout": {"stop_when_worse": 3}})["best_evaluation"] == lines[0]


def test_record_is_replaced_atomically(tmp_path: Path) -> None:
    assert read_record(tmp_path) == RunRecord()
    write_record(tmp_path, RunRecord(state=RunState.RUNNING))
    with pytest.raises(PydanticSerializationError):
        write_record(tmp_path, RunRecord(supervisor={"pid": object()}))
    assert json.loads((tmp_path / "run.json").read_text()) == {"version": 1, "state": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_record_without_a_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"state": "completed", "run": "tiny"}')
    record = read_record(tmp_path)
    assert (record.state, record.run) == (RunState.COMPLETED, "tiny")


@pytest.mark.parametrize(
    "odd",
    [{"state": "asleep"}, {"run": 7}, {"workers": [1]}, {"workers": {"queue": 3}}, {"exit_code": "none"}],
    ids=str,
)
def test_record_with_other_types_is_refused(tmp_path: Path, odd: dict[str, object]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(odd))
    with pytest.raises(InputError, match=rf"{tmp_path}/run\.json is no record of a run \({next(iter(odd))}"):
        read_record(tmp_path)


def test_a_start_reads_the_record_of_another_run_only(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run": "tiny-1", "workers": [1]}')
    with sole_writer(tmp_path, "tiny-1"):
        pass
    with (
        pytest.raises(InputError, match="workers: input should be a valid dictionary"),
        sole_writer(tmp_path, "tiny-2"),
    ):
        pass


@pytest.mark.parametrize("version", [2, "1.5"])
def test_record_of_a_later_version_is_refused(tmp_path: Path, version: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"version": version, "state": "completed"}))
    with pytest.raises(InputError, match=rf"run\.json has version {version}, and this xtoken reads versions up to 1"):
        read_record(tmp_path)
