"""Weights that are sent to servers by NCCL: on the CPU its calls go by TCP."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from tests.support import tcp_nccl
from tests.unit.rollout.test_served import PROMPTS, Run
from xtoken_services.common.http_engine import vllm
from xtoken_services.common.http_engine.errors import EngineError, EngineRefusalError


@pytest.fixture
def sending(
    request: pytest.FixtureRequest, stack: ExitStack, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """A run whose weights are sent by NCCL to a device, on the CPU by TCP."""
    for call in tcp_nccl.CALLS if request.param == "cpu" else ():
        monkeypatch.setattr(*call)
    run = Run(stack, student, tmp_path / "run", f"vllm-nccl-{request.param}")
    stack.callback(lambda: [group.close() for group in run.engine._groups.values()])
    return run


def senders() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "nccl" in " ".join(child.cmdline())]


CPU = pytest.param("cpu", marks=pytest.mark.slow)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes no GPU twice")


@pytest.mark.parametrize("sending", [CPU, pytest.param("cuda:1", marks=[pytest.mark.gpu, TWO_GPUS])], indirect=True)
def test_weights_are_sent_by_nccl(sending: Run) -> None:
    """Two versions to one server, which is then started again, and a third to one that dies at a tensor."""
    seen = set()
    for restarted, dies_at in ((False, -1), (False, -1), (True, -1), (False, 2)):
        if restarted:
            sending.server = sending.ready()
        else:
            sending.server.dies_at = dies_at
            sending.publish()
        sending.check(*PROMPTS)
        [sender] = senders()
        seen.add(sender)
    os.kill(senders()[0], signal.SIGKILL)  # another one takes over
    sending.publish()
    sending.check(*PROMPTS)
    assert len({*seen, *senders()}) == 4 and not sending.directory.exists()
    assert sending.engine.pool.retries == 2  # of the server that died: the update, and its end on the next one


@pytest.mark.parametrize("sending", [CPU], indirect=True)
@pytest.mark.parametrize(
    ("change", "command", "reason"),
    [
        ({"device": None}, None, r"500: .*'master_address'.*; start it \(again, if it hangs\) on another GPU than cpu"),
        ({"_join": lambda *_: time.sleep(8)}, None, "no answer; start it"),
        ({}, ("false",), "the process that sends weights from cpu has not begun: the log says why"),
    ],
    ids=["ipc", "hangs", "ours"],
)
def test_a_vllm_that_does_not_join(
    sending: Run, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], command: Any, reason: str
) -> None:
    vars(sending.server).update(change)
    sending.engine.pool.timeout_s = 5.0 if "_join" in change else 20.0
    monkeypatch.setattr(vllm, "SENDER", command or vllm.SENDER)
    with pytest.raises((EngineError, EngineRefusalError), match=reason):
        sending.publish()
    assert senders() == []
