import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


class Peer:
    """A real second process at a ring."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ring_peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, do, **arguments):
        """The whole answer, an error included; None if the process has died."""
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def do(self, do, **arguments):
        answer = self.ask(do, **arguments)
        assert answer is not None and "error" not in answer, answer
        return answer["ok"]

    def kill(self):
        self.process.kill()
        return self.process.wait()


@pytest.fixture
def peers():
    """Starts other processes; they end with the test."""
    started = []

    def start():
        started.append(Peer())
        return started[-1]

    yield start
    for peer in started:
        peer.kill()
        peer.process.stdin.close()
        peer.process.stdout.close()


@pytest.fixture
def shm():
    """A directory of its own in shared memory."""
    directory = Path(tempfile.mkdtemp(prefix="test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)
