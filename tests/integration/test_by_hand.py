"""The README's four commands, each started by itself: a run without a supervisor, stopped, exported, gone on with."""

import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes import ROOT, free_port
from tests.integration.conftest import Tiny
from tests.support.tiny_run import steps_of, write_run
from xtoken_services.trainer.export_checkpoint import export_checkpoint

LIMIT_S = 120.0


class Hand:
    """Who types the commands: each is a process of its own, its log a file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.where = ["tcp://127.0.0.1:" + str(free_port()), "--token-file", str(directory / "queue.token")]
        self.started: list[subprocess.Popen[bytes]] = []

    def starts(self, kind: str, *arguments: str) -> subprocess.Popen[bytes]:
        to = "--bind" if kind == "queue" else "--queue"
        with (self.directory / f"{kind}-{len(self.started)}.log").open("wb") as log:
            command = [sys.executable, "-m", "xtoken_services.cli", kind, to, *self.where, *arguments]
            self.started.append(subprocess.Popen(command, cwd=ROOT, stderr=log))
        return self.started[-1]

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(self.directory.glob("*.log")))


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    found = Hand(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_four_commands_make_a_run_that_is_stopped_exported_and_gone_on_with(tiny: Tiny, hand: Hand) -> None:
    spec = tiny.spec(records=160, train={"checkpoint_every": 100})
    document = spec.model_dump(mode="json", exclude_defaults=True) | {"eval": "none"}
    for part in (document["student"], *document["teacher"]):
        del part["context_length"]  # left out, as by the README's run file
    file = write_run(tiny.path, document)
    workers = [hand.starts("collator"), hand.starts("teacher", "--teacher", "0", "--rank", "0")]
    hand.starts("queue", "--run", str(file))  # later than some, and it makes the token file
    trainer = hand.starts("trainer", "--rank", "0")
    deadline = time.monotonic() + LIMIT_S
    while len(steps_of(spec.output)) < 4:
        assert time.monotonic() < deadline and trainer.poll() is None, hand.logs()
        time.sleep(0.05)
    trainer.terminate()
    assert trainer.wait(LIMIT_S) == 0, hand.logs()
    halfway = export_checkpoint(spec.output)
    assert 4 <= halfway.step == len(steps_of(spec.output)) < 20
    modes = {stat.S_IMODE(path.stat().st_mode) for path in halfway.target.iterdir()}
    assert modes == {stat.S_IMODE(file.stat().st_mode)}, "who may read the card may read the weights"
    workers.append(hand.starts("trainer", "--rank", "0"))
    assert [worker.wait(LIMIT_S) for worker in workers] == [0, 0, 0], hand.logs()
    assert [i for line in steps_of(spec.output) for i in line["ids"]] == list(range(160))
    assert (spec.output / "model" / "model.safetensors").exists()
