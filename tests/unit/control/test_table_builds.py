"""Alignments and table builds that a control plane makes in other processes."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.waiting import until
from tests.unit.core.test_evaluation import byte_tokenizer
from xtoken_core.config.loss import PairKind
from xtoken_core.errors import InputError
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.control import table_builds
from xtoken_services.control.isolated.align_server import AlignServer
from xtoken_services.control.table_builds import BusyError, TableBuild, TableBuilds


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that reports half of its work until a file is there, and then its result."""
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "from xtoken_services.common.processes.child_process import answer_requests\n"
        "def build(request, progress):\n    progress('', 0.5)\n"
        f"    while not Path({str(tmp_path)!r}, 'go').exists(): time.sleep(0.02)\n"
        "    return {'file': request['student'], 'facts': [request['kind']]}\nanswer_requests(build)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(table_builds, "BUILDER", "slow")
    return tmp_path / "go"


def test_progress_result_and_limit(slow: Path) -> None:
    builds = TableBuilds({})
    first = builds.start("chain", Path("/a"), Path("/b"), {})
    assert builds.start("chain", Path("/a"), Path("/b"), {}) is first
    second = builds.start("projection", Path("/a"), Path("/b"), {})
    with pytest.raises(BusyError, match="2 builds are in progress"):
        builds.start("chain", Path("/a"), Path("/c"), {})
    until(lambda: first.done == 0.5)
    builds.cancel(second.id)
    until(lambda: not second.active)
    assert second.error == "cancelled" and second.file == ""
    slow.touch()
    until(lambda: not first.active)
    assert (first.done, first.file, first.facts, first.error) == (1.0, "/a", ["chain"], "")
    assert builds.list() == [second, first]


def test_page(client: TestClient, tmp_path: Path, slow: Path) -> None:
    for name in ("student", "teacher"):
        (tmp_path / "data" / name).mkdir()
    fields = {name: str(tmp_path / "data" / name) for name in ("student", "teacher")} | {"kind": "chain"}
    assert "lies under none of" in client.post("/tables", data=fields | {"student": "/etc"}).text
    assert "Choose what to build" in client.post("/tables", data=fields | {"kind": "all"}).text
    assert client.post("/tables", data=fields | {"special_tokens": "<a>="}).headers["location"] == "/tables"
    until(lambda: "50.0 %" in client.get("/tables").text)
    assert "&lt;a&gt;=" in client.get("/tables").text
    slow.touch()
    until(lambda: "ready" in client.get("/tables", headers={"HX-Request": "true"}).text)


@pytest.mark.slow
def test_real_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.tiny_run import make_assets

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    make_assets(data)
    builds = TableBuilds(Roots.of([data], []).environment)

    def built(kind: PairKind, student: Path, teacher: Path) -> TableBuild:
        build = builds.start(kind, student, teacher, {})
        until(lambda: not build.active)
        return build

    chain = built("chain", data / "student", data / "teacher")
    assert Path(chain.file).parent == tmp_path / "cache" / "xtoken" / "chain" and Path(chain.file).is_file()
    assert "common tokens" in chain.facts[0] and len(chain.facts) == 3
    written = Path(chain.file).stat().st_mtime_ns
    assert built("chain", data / "student", data / "teacher").file == chain.file
    assert Path(chain.file).stat().st_mtime_ns == written
    assert "student tokens" in built("projection", data / "student", data / "teacher").facts[0]
    assert "have the same tokenizer" in built("chain", data / "student", data / "student").error
    (tmp_path / "outside").mkdir()
    assert "lies under none of" in built("chain", tmp_path / "outside", data / "teacher").error


TIMEOUT_S = 120.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AlignServer]:
    (tmp_path / "data").mkdir()
    made = AlignServer(Roots.of([tmp_path / "data"], []).environment)
    yield made
    made.close()


@pytest.mark.slow
def test_align_server_keeps_its_tokenizers(server: AlignServer, tmp_path: Path) -> None:
    student, teacher = tmp_path / "data" / "student", tmp_path / "data" / "teacher"
    for directory in (student, teacher):
        byte_tokenizer(bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    shutil.copytree(student, tmp_path / "outside")

    def chunks(text: str) -> list[int]:
        answer = server.align(student, teacher, text, timeout_s=TIMEOUT_S)
        return [len({token["chunk"] for token in side["tokens"]} - {-1}) for side in answer["sides"]]

    assert chunks("naïve\n") == [7, 7]
    process = server._child
    began = time.monotonic()
    assert chunks("abc") == [3, 3]
    assert time.monotonic() - began < 2.0 and server._child is process
    with pytest.raises(InputError, match="lies under none of"):
        server.align(tmp_path / "outside", teacher, "a", timeout_s=TIMEOUT_S)
    with pytest.raises(InputError, match="it took longer than"):
        server.align(student, teacher, "a", timeout_s=0.0)
    assert not process.alive

    assert chunks("ab") == [2, 2]
    process = server._child
    os.kill(process.pid, signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)
    assert chunks("ab") == [2, 2]
