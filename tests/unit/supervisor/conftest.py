"""The scripted run as a fixture that also checks that nothing is left of it."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.supervisor.scripted_run import ScriptedRun


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRun]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sockets = Path(tempfile.mkdtemp(prefix="xtoken-test-"))
    run = ScriptedRun(tmp_path, sockets)
    try:
        yield run
        if run.supervisor is not None and run.ending is None:
            run.supervisor.stop(now=True)
            run.wait()
        assert run.left_behind() == []
    finally:
        shutil.rmtree(sockets)
