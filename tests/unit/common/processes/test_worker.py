"""A worker's life on the queue: heartbeats follow progress, and an ended session makes it leave."""

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.runs import resolved_run
from tests.support.waiting import until
from xtoken_core.data_plane.address import Address, create_token, read_token
from xtoken_core.errors import QueueUnreachableError, StaleSessionError
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_services.common.processes import worker as module
from xtoken_services.common.processes.waits import Wait
from xtoken_services.common.processes.worker import QueueLink, StopRequested, worker_session
from xtoken_services.queue.main import open_run
from xtoken_services.queue.server import Server


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Engine]]:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(module, "EARLY_S", 0.3)
    tmp_path.chmod(0o700)
    engine = Engine(memory_limit=1 << 20, clock=time.monotonic, opens=any_partition)
    server = Server(engine, Address.parse(f"ipc://{tmp_path}/q"))
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield f"ipc://{tmp_path}/q", engine
    server.stop()
    thread.join()


def test_a_worker_reports_its_progress_and_says_goodbye(queue: tuple[str, Engine], tmp_path: Path) -> None:
    url, engine = queue
    open_run(engine, resolved_run(tmp_path))
    with worker_session(QueueLink(url), role="collator", name="c") as worker:
        session = next(s for s in engine.sessions.live.values() if s.name == "c")
        worker.phase("run")
        worker.alive(3)
        until(lambda: session.progress == 3 and session.phase == "run")
        worker.activity("measuring")
        with Wait() as wait:
            wait.whom, wait.began = "http://h:8000: no answer", time.monotonic() - 60
            named = re.compile(r"measuring, waiting 6\d s for http://h:8000: no answer")
            until(lambda: named.fullmatch(session.activity))
        until(lambda: session.activity == "measuring")
    assert session.ended == "bye"


def test_heartbeats_stop_when_the_main_loop_hangs(queue: tuple[str, Engine], tmp_path: Path) -> None:
    url, engine = queue
    open_run(engine, resolved_run(tmp_path, hang_timeout_s=0.1))
    with worker_session(QueueLink(url), role="collator", name="c") as worker:
        worker.phase("run")
        session = next(s for s in engine.sessions.live.values() if s.name == "c")
        opened = session.last_seen
        until(lambda: session.phase == "run" and session.last_seen > opened)  # a heartbeat was received
        until(lambda: time.monotonic() - session.last_seen > 0.5)


def test_a_wait_without_an_answer_is_no_progress(queue: tuple[str, Engine], tmp_path: Path) -> None:
    url, engine = queue
    open_run(engine, resolved_run(tmp_path))
    with worker_session(QueueLink(url), role="collator", name="c") as worker:
        worker.waiting(0)
        at = worker._alive_at
        worker.waiting(0)
        assert worker._alive_at == at
        worker.waiting(1)
        assert worker._alive_at > at
        worker.stopping.set()
        with pytest.raises(StopRequested):
            worker.waiting(1)


def test_an_ended_session_makes_the_worker_leave(queue: tuple[str, Engine], tmp_path: Path) -> None:
    url, engine = queue
    open_run(engine, resolved_run(tmp_path))
    with (
        pytest.raises(StaleSessionError, match="told to"),
        worker_session(QueueLink(url), role="x", name="c") as worker,
    ):
        engine.sessions.end(worker.client.session, "told to")
        for _ in range(1000):
            worker.alive()
            time.sleep(0.01)
    assert StaleSessionError.exit_code == 75


def test_a_queue_without_a_run_is_named(queue: tuple[str, Engine]) -> None:
    url, _ = queue
    with (
        pytest.raises(QueueUnreachableError, match="no run was opened"),
        worker_session(QueueLink(url), role="x", name="c"),
    ):
        pass


def test_a_worker_waits_for_the_token_file_and_says_what_is_missing(tmp_path: Path) -> None:
    token = tmp_path / "queue.token"
    link = QueueLink("tcp://127.0.0.1:1", token, patience_s=0.3)
    with (
        pytest.raises(
            QueueUnreachableError, match=r"there is no token file .*queue.token after 0.3 s: start the queue"
        ),
        worker_session(link, role="collator", name="c"),
    ):
        pass
    maker = threading.Timer(0.2, create_token, [token])
    maker.start()
    with (
        pytest.raises(QueueUnreachableError, match="no reply from"),
        worker_session(replace(link, patience_s=2.0), role="collator", name="c"),
    ):
        pass
    maker.join()
    assert [path.name for path in tmp_path.iterdir()] == ["queue.token"]
    assert create_token(token) == read_token(token)
