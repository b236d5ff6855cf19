"""Logs of a run: which are shown of many, and how much of them is read."""

import asyncio
from pathlib import Path

import pytest

from xtoken_services.control import logs
from xtoken_services.control.logs import Follower, last_attempts, logs_in, merged


def write(output: Path, name: str, text: str = "") -> None:
    (output / "logs").mkdir(exist_ok=True)
    with (output / "logs" / name).open("a") as file:
        file.write(text)


def test_last_attempts_of_many_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOGS", 4)
    for worker in "abc":
        write(tmp_path, f"{worker}.1.log")
    write(tmp_path, "a.2.log")
    assert [(log.worker, log.attempt) for log in logs_in(tmp_path)] == [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    for worker in "def":
        write(tmp_path, f"{worker}.1.log")
    assert [(log.worker, log.attempt) for log in logs_in(tmp_path)] == [("a", 2), ("b", 1), ("c", 1), ("d", 1)]


def test_bytes_read_to_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MERGED_BYTES", 800)
    for worker in ("a", "b"):
        write(tmp_path, f"{worker}.1.log", "".join(f"{number:08}\n" for number in range(1000)))
    lines = list(merged(last_attempts(logs_in(tmp_path)), 1000))
    assert len(lines) == 2 * (400 // 9) and lines[-1] == b"b | 00000999"


def test_follower_of_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 100)
    monkeypatch.setattr(logs, "TAIL_BYTES", 50)
    for worker in ("a", "b"):
        write(tmp_path, f"{worker}.1.log", "before\n")
    follower = Follower(tmp_path, "")
    write(tmp_path, "a.1.log", "x" * 120 + "\n" + "line\n" * 20)
    write(tmp_path, "b.1.log", "other\n")
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
            write(output, "a.1.log", line)
            await asyncio.sleep(2.5 * logs.POLL_S)
        write(output, "a.1.log", lines[-1])
        over.append(True)
        return await task

    return asyncio.run(run())


def test_lines_are_followed_to_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.02)
    write(tmp_path, "a.1.log", "before\n")
    follower = Follower(tmp_path, "")
    assert followed(follower, tmp_path, ["1\n", "2\n", "3\n"]) == b"a | 1\na | 2\na | 3\n"


def test_more_than_one_read_is_left_at_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 100)
    monkeypatch.setattr(logs, "TAIL_BYTES", 50)
    write(tmp_path, "a.1.log")
    follower = Follower(tmp_path, "")
    assert followed(follower, tmp_path, ["line\n" * 100]) == b"a | line\n" * 100
