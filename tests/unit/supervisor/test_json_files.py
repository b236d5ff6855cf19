"""Readers of JSON files that are being written, and the run's record."""

import json
from pathlib import Path

import pytest
from pydantic_core import PydanticSerializationError

from xtoken_core.errors import InputError
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.json_files import last_line, read_json
from xtoken_services.supervisor.run_directory import sole_writer
from xtoken_services.supervisor.run_record import RunRecord, read_record, write_record


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
