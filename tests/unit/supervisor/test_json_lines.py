"""Reading lines that are being written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.supervisor.json_lines import last_line_of, lines_after
from services.supervisor.run_record import read_record, write_record


def test_the_last_whole_line_without_its_ids(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    rows = [{"step": n, "loss": n / 2, "ids": list(range(30_000))} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    assert last_line_of(file) == {"step": 2, "loss": 1.0}
    assert lines_after(file, 0, 10) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}]
    assert lines_after(file, -1, 1) == [{"step": 0, "loss": 0.0}]


def test_one_long_line(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps({"step": 0, "ids": list(range(30_000))}) + "\n")
    assert last_line_of(file) == {"step": 0}


@pytest.mark.parametrize("text", [None, "", "torn", "no json\n", "[1]\n"])
def test_nothing_to_read(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "steps.jsonl"
    if text is not None:
        file.write_text(text)
    assert last_line_of(file) is None
    assert lines_after(file, -1, 5) == []


def test_a_record_is_replaced_whole(tmp_path: Path) -> None:
    assert read_record(tmp_path) == {}
    write_record(tmp_path, {"state": "running"})
    with pytest.raises(TypeError):
        write_record(tmp_path, {"state": object()})
    assert read_record(tmp_path) == {"state": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
