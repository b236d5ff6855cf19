import json
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.preloaded import CONTEXT
from tests.unit.teacher.ring_peer import serve


class Peer:
    """A real second process at a ring."""

    def __init__(self):
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(other,))
        self.process.start()
        other.close()

    def ask(self, do, **arguments):
        """The whole answer, an error included; None if the process has died."""
        try:
            self.pipe.send_bytes(json.dumps({"do": do, **arguments}).encode())
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return None

    def do(self, do, **arguments):
        answer = self.ask(do, **arguments)
        assert answer is not None and "error" not in answer, answer
        return answer["ok"]

    def ended(self):
        """The exit status, once nothing more is asked."""
        self.pipe.close()
        self.process.join()
        return self.process.exitcode

    def kill(self):
        self.process.kill()
        return self.ended()


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


@pytest.fixture
def shm():
    """A directory of its own in shared memory."""
    directory = Path(tempfile.mkdtemp(prefix="test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)
