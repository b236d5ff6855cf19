"""What an attack is given, and the exception that reports a fault of the product."""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.attack.free_time import FreeTime
from tests.contract.reference_client import Client
from xtoken_core.data_plane.address import Address

HUNG_S = 600.0
"""Wall-clock limit of a request: bounds are of `clock`, which also ends an attack whose request gets no answer."""


class FaultError(AssertionError):
    """The product did something that it must never do; the text names it."""


@dataclass(frozen=True)
class Target:
    """Addresses of a control plane, of the queue of its run, and of another queue that has a token.

    Attributes:
        url: URL of the control plane.
        http_token: Its bearer token.
        queue: Address of the queue that is attacked.
        queues: Address of the run's queue, a socket of this user; and of one at a loopback port, with its token file.
        directory: Directory that runs may read, where an attack may write files.
        runs: Directory of the control plane's runs.
        spec: A run file as JSON that the control plane accepts.
        clock: Clock of the time that the machine had for the stage.
        victim: Id of a run that is over, whose files an attack may replace.
        victim_output: Directory of that run.
        working_directory: Working directory of the control plane.
    """

    url: str
    http_token: str
    queue: Address
    queues: tuple[Address, Address]
    directory: Path
    runs: Path
    spec: dict[str, Any]
    clock: FreeTime
    victim: str
    victim_output: Path
    working_directory: Path

    def http(self, timeout: float = HUNG_S) -> httpx.Client:
        """Return an authenticated client of the control plane; `clock` measures how long an answer takes."""
        return httpx.Client(base_url=self.url, timeout=timeout, headers={"Authorization": f"Bearer {self.http_token}"})

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of the control plane."""
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def queue_port(self) -> int:
        """Port of the queue that has one."""
        return int(self.queues[1].url.rsplit(":", 1)[1])

    def peer(self, name: str = "", role: str = "library", **options: Any) -> Client:
        """Return an authenticated client of the queue with a session of its own."""
        client = connect(self.queue)
        client.hello(name or f"attack-{secrets.token_hex(4)}", role, time.time_ns(), **options)
        return client

    def scratch(self, name: str) -> Path:
        """Create an empty directory that the control plane's runs may read."""
        path = self.directory / f"{name}-{secrets.token_hex(4)}"
        path.mkdir()
        return path


def connect(queue: Address, patience_s: float = 60.0) -> Client:
    """Return an authenticated client without a session."""
    token = queue.token_file.read_text().strip() if queue.token_file is not None else None
    return Client(queue.url, token, patience_s=patience_s)


Attack = Callable[[Target, random.Random, float], None]
"""Called with a target, a seeded generator and the seconds it may take; raises `FaultError`."""
