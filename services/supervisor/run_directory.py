"""Where a run lives: its output directory, which nobody else may write to, and the private one of its queue."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.supervisor.os_process import Identity
from services.supervisor.run_record import read_record
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import IPC_PATH_BYTES, Address, create_token
from xtoken_core.data_plane.keys import CLIENTS, create_client_keys, create_queue_keys
from xtoken_core.errors import XtokenError

SOCKET = "queue"
KEYS = "keys"
QUEUE_PLACE, KEYS_PLACE = "tcp://@queue@", "@keys@"
"""What stands for a queue's address and for its directory of keys where only the machine that it is on decides them."""


class OccupiedError(XtokenError):
    """Another run is writing to the same directory."""

    status = 409


@dataclass(frozen=True)
class QueuePlace:
    """Where a run's queues are.

    Attributes:
        addresses: One per node group.
        private: A directory of this user alone, for their sockets and proofs.
    """

    addresses: tuple[Address, ...]
    private: Path

    @classmethod
    def make(cls, spec: RunSpec) -> QueuePlace:
        """A new one."""
        place = tempfile.gettempdir()
        longest = len(os.fsencode(place)) + len("/xtoken-12345678/") + len(f"{SOCKET}-1023")
        private = Path(tempfile.mkdtemp(prefix="xtoken-", dir=None if longest <= IPC_PATH_BYTES else "/tmp"))
        return cls(_addresses_of(spec, private), private)

    def document(self) -> dict[str, Any]:
        """For the database."""
        first = self.addresses[0]
        return {
            "urls": [address.url for address in self.addresses],
            "token_file": str(first.token_file) if first.token_file else None,
            "keys": str(first.keys) if first.keys else None,
            "private": str(self.private),
        }

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> QueuePlace:
        """The opposite of `document`."""
        token, keys = (Path(document[name]) if document.get(name) else None for name in ("token_file", "keys"))
        urls = document.get("urls") or [document["url"]]
        return cls(tuple(Address(url, token, keys) for url in urls), Path(document["private"]))

    def remove(self) -> None:
        """Nothing of it is left."""
        shutil.rmtree(self.private, ignore_errors=True)


def _addresses_of(spec: RunSpec, private: Path) -> tuple[Address, ...]:
    nodes = spec.workers.nodes
    if spec.workers.launcher == "ray":
        make_keys(private / KEYS)
        return (Address(QUEUE_PLACE, None, Path(KEYS_PLACE)),) * nodes
    if nodes > 1:
        return tuple(Address.parse(f"ipc://{private / SOCKET}-{node}") for node in range(nodes))
    if spec.queue.address is None:
        return (Address.parse(f"ipc://{private / SOCKET}"),)
    address = Address.parse(spec.queue.address)
    if address.ipc_path is not None:
        return (address,)
    token = address.token_file or private / "token"
    create_token(token)
    return (Address.parse(spec.queue.address, token),)


def make_keys(directory: Path) -> None:
    """Keys of a run's queues and of those who may reach them: one pair each, all in one directory.

    Raises:
        InputError: It cannot be written.
    """
    create_queue_keys(directory)
    client = create_client_keys(directory)
    shutil.copy(client, directory / CLIENTS / client.name)


@contextmanager
def sole_writer(output: Path, run_id: str) -> Iterator[None]:
    """Hold a run's directory against any other run.

    Raises:
        OccupiedError: Another run is writing there, or processes are that another control plane has left.
        XtokenError: It cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise XtokenError(f"cannot make the output directory {output}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OccupiedError(f"another run is writing to {output}: stop it, or name another output") from error
        _check_left_processes(output, run_id)
        yield
    finally:
        os.close(handle)


def _check_left_processes(output: Path, run_id: str) -> None:
    record = read_record(output)
    if record.get("run") in (None, run_id):
        return
    found = [Identity.of_document(worker.get("identity") or {}) for worker in record.get("workers", {}).values()]
    living = [str(process.pid) for process in found if process is not None and process.alive]
    if living:
        raise OccupiedError(
            f"processes of the run {record['run']} still write to {output} ({', '.join(living)}): start its control "
            "plane again, which finds them, or name another output"
        )
