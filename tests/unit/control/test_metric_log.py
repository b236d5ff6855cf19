"""Logs and metrics of a run, as a control plane reads them."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from xtoken_services.control import logs, views
from xtoken_services.control.logs import Follower, last_attempts, logs_in, merged
from xtoken_services.control.views import MetricLog
from xtoken_services.supervisor import run_files


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "POLL_S", 0.0)


def write(file: Path, rows: list[dict[str, Any]], *, mode: str = "w") -> None:
    with file.open(mode) as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def test_means_of_intervals(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    write(file, [{"step": n, "loss": float(n), "tokens": n, "ids": [n]} for n in range(1000)])
    curve = MetricLog(file)
    curve.refresh()
    found = curve.sample(-1, 10)
    assert [row["step"] for row in found] == [99, 199, 299, 399, 499, 599, 699, 799, 899, 999]
    assert [row["loss"] for row in found] == [49.5 + 100 * n for n in range(10)]
    assert curve.sample(997, 10) == [{"step": n, "loss": float(n), "tokens": n} for n in (998, 999)]
    assert curve.sample(999, 10) == []
    assert len(curve) == 1000 and curve.last == {"step": 999, "loss": 999.0, "tokens": 999}


def test_the_best_evaluation_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    bits: list[Any] = [1.0, 3.0, 2.0, None, 10**400, 2.5]
    write(file, [{"step": n, "bits_per_byte": value} for n, value in enumerate(bits)])
    curve = MetricLog(file)
    curve.refresh()
    assert curve.best({}) == {"step": 2, "bits_per_byte": 2.0}
    write(file, [{"step": 0, "bits_per_byte": 1.0}])  # a run that is started again
    curve.refresh()
    assert curve.best({}) is None


def test_growth_and_incomplete_lines(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    curve = MetricLog(file)
    curve.refresh()
    assert curve.sample(-1, 5) == [] and curve.last is None
    write(file, [{"step": 0, "loss": 1.0}])
    with file.open("a") as out:
        out.write('{"step": 1, "lo')
    curve.refresh()
    assert curve.sample(-1, 5) == [{"step": 0, "loss": 1.0}]
    with file.open("a") as out:
        out.write('ss": 2.0, "late": 3}\nno json\n[1]\n{"loss": 1}\n')
    curve.refresh()
    assert curve.sample(-1, 5) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0, "late": 3}]


def test_rewind(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    write(file, [{"step": n, "loss": 1.0} for n in range(6)])
    curve = MetricLog(file)
    curve.refresh()
    scratch = tmp_path / "scratch"
    write(scratch, [{"step": n, "loss": 1.0} for n in range(3)])
    scratch.replace(file)
    write(file, [{"step": n, "loss": 2.0} for n in range(3, 8)], mode="a")
    curve.refresh()
    assert len(curve) == 8
    assert [row["loss"] for row in curve.sample(-1, 10)] == [1.0] * 3 + [2.0] * 5


def test_non_finite_values(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    write(file, [{"step": 0, "loss": float("nan"), "why": "x", "ok": True}, {"step": 1, "loss": 3.0}])
    curve = MetricLog(file)
    curve.refresh()
    assert curve.sample(-1, 1) == [{"step": 1, "loss": 3.0}]
    assert curve.sample(-1, 2) == [{"step": 0}, {"step": 1, "loss": 3.0}]
    assert curve.recent[0] == {"step": 0, "loss": None, "why": "x", "ok": True}


def test_file_that_no_trainer_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(run_files, "CHUNK_BYTES", 256)
    hostile = ["[" * 900, '{"step": 1e400}', '{"step": true}', '{"step": -1}', '{"step": 99999999999999999999}',
               '{"step": 2, "text": "\\ud800"}', '{"step": 3, "n": 1' + "0" * 400 + "}", "x" * 5000]  # fmt: skip
    file = tmp_path / "steps.jsonl"
    file.write_text('{"step": 0}\n' + "\n".join(hostile) + '\n{"step": 7, "loss": 1.0}\n')
    curve = MetricLog(file)
    curve.refresh()
    assert curve.sample(-1, 10) == [{"step": 0}, {"step": 3}, {"step": 7, "loss": 1.0}]
    with file.open("a") as out:
        out.write("y" * 5000)
    curve.refresh()
    with file.open("a") as out:
        out.write('y"}\n{"step": 8}\n')
    curve.refresh()
    assert curve.sample(7, 10) == [{"step": 8}]


def test_huge_line_is_passed_over_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MAX_PASSED_BYTES", 1 << 25)
    file = tmp_path / "steps.jsonl"
    write(file, [{"step": 0}])
    with file.open("ab") as out:
        out.truncate(1 << 27)
        out.seek(0, os.SEEK_END)
        out.write(b'\n{"step": 1}\n')
    curve, seen = MetricLog(file), []
    for _ in range(5):
        curve.refresh()
        seen.append(len(curve))
    assert seen == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_curve_that_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text('{"step": 0, "loss": 1.0}\n')
    file = tmp_path / "steps.jsonl"
    os.mkfifo(file) if kind == "fifo" else file.symlink_to(tmp_path / "secret")
    curve = MetricLog(file)
    curve.refresh()
    assert len(curve) == 0


def write_log(output: Path, name: str, text: str = "") -> None:
    (output / "logs").mkdir(exist_ok=True)
    with (output / "logs" / name).open("a") as file:
        file.write(text)


def test_last_attempts_of_many_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOGS", 4)
    for worker in "abc":
        write_log(tmp_path, f"{worker}.1.log")
    write_log(tmp_path, "a.2.log")
    assert [(log.worker, log.attempt) for log in logs_in(tmp_path)] == [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    for worker in "def":
        write_log(tmp_path, f"{worker}.1.log")
    assert [(log.worker, log.attempt) for log in logs_in(tmp_path)] == [("a", 2), ("b", 1), ("c", 1), ("d", 1)]


def test_bytes_read_to_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MERGED_BYTES", 800)
    for worker in ("a", "b"):
        write_log(tmp_path, f"{worker}.1.log", "".join(f"{number:08}\n" for number in range(1000)))
    lines = list(merged(last_attempts(logs_in(tmp_path)), 1000))
    assert len(lines) == 2 * (400 // 9) and lines[-1] == b"b | 00000999"


def test_follower_of_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 100)
    monkeypatch.setattr(logs, "TAIL_BYTES", 50)
    for worker in ("a", "b"):
        write_log(tmp_path, f"{worker}.1.log", "before\n")
    follower = Follower(tmp_path, "")
    write_log(tmp_path, "a.1.log", "x" * 120 + "\n" + "line\n" * 20)
    write_log(tmp_path, "b.1.log", "other\n")
    parts = [follower.read() for _ in range(10)]
    assert all(len(part) < 300 for part in parts) and b"b | other\n" in parts[0]
    lines = b"".join(parts).splitlines()
    assert lines.count(b"a | line") == 20 and sum(line.count(b"x") for line in lines) == 120


def followed(follower: Follower, output: Path, lines: list[str]) -> bytes:
    """Return what a follower yields while lines are written, and a last one as the run ends."""
    over = []

    async def text() -> bytes:
        return b"".join([part async for part in follower.added(lambda: bool(over))])

    async def run() -> bytes:
        task = asyncio.create_task(text())
        for line in lines[:-1]:
            write_log(output, "a.1.log", line)
            await asyncio.sleep(2.5 * logs.POLL_S)
        write_log(output, "a.1.log", lines[-1])
        over.append(True)
        return await task

    return asyncio.run(run())


def test_lines_are_followed_to_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.02)
    write_log(tmp_path, "a.1.log", "before\n")
    follower = Follower(tmp_path, "")
    assert followed(follower, tmp_path, ["1\n", "2\n", "3\n"]) == b"a | 1\na | 2\na | 3\n"


def test_more_than_one_read_is_left_at_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 100)
    monkeypatch.setattr(logs, "TAIL_BYTES", 50)
    write_log(tmp_path, "a.1.log")
    follower = Follower(tmp_path, "")
    assert followed(follower, tmp_path, ["line\n" * 100]) == b"a | line\n" * 100
