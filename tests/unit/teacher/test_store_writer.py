"""What a writer of a store reports to its supervisor."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from xtoken_services.common.processes.worker import StopRequested
from xtoken_services.common.stores import SIGN_OF_LIFE
from xtoken_services.supervisor.writer_progress import WriterProgress
from xtoken_services.teacher.store_writer import reporter


def test_what_a_teacher_reports_before_the_first_line_is_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stopping = [100.0], threading.Event()
    monkeypatch.setattr("xtoken_services.supervisor.writer_progress.time", SimpleNamespace(monotonic=lambda: clock[0]))
    writers, report = WriterProgress(tmp_path, {0: 2}), reporter(tmp_path / SIGN_OF_LIFE.format(rank=0), stopping)

    def silence_after(activity: str) -> float:
        clock[0] += 50.0
        report(activity)
        assert writers.steps_done() == 0
        return writers.silent_for("writer-0", started_at=100.0)

    said = ["measuring: 1%", "measuring: 1%", "measuring: 2%", "", ""]
    assert list(map(silence_after, said)) == [0.0, 50.0, 0.0, 0.0, 0.0]
    assert writers.phase("writer-0") == "load"
    stopping.set()
    with pytest.raises(StopRequested):
        report("measuring: 3%")
