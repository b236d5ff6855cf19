"""The process that aligns for a control plane: it stays, answers again at once, and is replaced when it dies."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.core.test_evaluation import byte_tokenizer
from xtoken_core.errors import InputError
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.control.isolated.align_server import AlignServer

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
    assert process is not None
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
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)
    assert chunks("ab") == [2, 2]
