"""Logs of a run: which are shown of many, and how much of them is read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from xtoken_services.control import logs, shared_logs
from xtoken_services.control.logs import Follower, last_attempts, logs_in, merged
from xtoken_services.control.shared_logs import LogStream, SharedLogs, pause_after


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


def test_pause_of_a_followed_log_under_load() -> None:
    assert [pause_after(seconds) for seconds in (0.001, 0.5, 60)] == [0.5, 2.0, 5.0]


def followed(shared: SharedLogs, streams: list[LogStream], write_lines: list[str], end: list[bool]) -> list[bytes]:
    """Return what each stream yields while these lines are written, one every other read."""

    async def lines_of(stream: LogStream) -> bytes:
        return b"".join([part async for part in stream.lines()])

    async def run() -> list[bytes]:
        tasks = [asyncio.create_task(lines_of(stream)) for stream in streams]
        for line in write_lines:
            write(shared._output, "a.1.log", line)
            await asyncio.sleep(2.5 * shared_logs.POLL_S)
        end.append(True)
        return await asyncio.gather(*tasks)

    return asyncio.run(run())


def test_streams_share_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the lines since it began; lines of before its first part are in its tail."""
    monkeypatch.setattr(shared_logs, "POLL_S", 0.02)
    write(tmp_path, "a.1.log", "before\n")
    end: list[bool] = []
    shared = SharedLogs(tmp_path, "", lambda: bool(end))
    early = shared.join()
    write(tmp_path, "a.1.log", "1\n")
    late = [shared.join() for _ in range(3)]
    texts = followed(shared, [early, *late], ["2\n", "3\n"], end)
    assert texts == [b"a | 1\na | 2\na | 3\n"] + [b"a | 2\na | 3\n"] * 3


def test_stream_behind_the_others_reads_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_logs, "POLL_S", 0.02)
    monkeypatch.setattr(shared_logs, "KEPT_BYTES", 10)
    write(tmp_path, "a.1.log")
    end: list[bool] = []
    shared = SharedLogs(tmp_path, "", lambda: bool(end))
    slow = shared.join()
    for number in range(5):
        write(tmp_path, "a.1.log", f"line {number}\n")
        shared.join()
    texts = followed(shared, [slow], ["line 5\n"], end)
    assert slow.own is not None
    assert texts[0].split(b"\n") == [b"a | line %d" % number for number in range(6)] + [b""]


def test_error_of_a_followed_log(tmp_path: Path) -> None:
    answers = [False]
    shared = SharedLogs(tmp_path, "", lambda: answers.pop())
    stream = shared.join()
    with pytest.raises(IndexError):
        followed(shared, [stream], [], [])
