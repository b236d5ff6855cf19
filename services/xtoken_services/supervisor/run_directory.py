"""The directories of a run: its output, locked against other runs, and the private one of its queues."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import IPC_PATH_BYTES, Address
from xtoken_core.data_plane.keys import CLIENTS, create_client_keys, create_queue_keys
from xtoken_core.errors import XtokenError
from xtoken_services.common.files.directory_lock import OccupiedError, sole_owner
from xtoken_services.supervisor.json_files import read_json
from xtoken_services.supervisor.os_process import Identity
from xtoken_services.supervisor.run_record import FILE, SPEC, read_record

SOCKET = "queue"
KEYS = "keys"
QUEUE_PLACEHOLDER, KEYS_PLACEHOLDER = "tcp://@queue@", "@keys@"
"""Placeholders for a queue's address and its directory of keys, where only the queue's machine decides them."""


@dataclass(frozen=True)
class QueueDirectory:
    """The private directory of a run's queues.

    Attributes:
        addresses: Addresses of the queues, one per node group.
        private: Directory of this user alone, for their sockets and keys.
    """

    addresses: tuple[Address, ...]
    private: Path

    @classmethod
    def create(cls, spec: RunSpec) -> QueueDirectory:
        """Create the directory of a run."""
        temporary = tempfile.gettempdir()
        # The kernel limits the path of a Unix socket, so a deep TMPDIR is not used.
        longest = len(os.fsencode(temporary)) + len("/xtoken-12345678/") + len(f"{SOCKET}-1023")
        private = Path(tempfile.mkdtemp(prefix="xtoken-", dir=None if longest <= IPC_PATH_BYTES else "/tmp"))
        return cls(_addresses(spec, private), private)

    def to_document(self) -> dict[str, Any]:
        """Return plain values for the database."""
        keys = self.addresses[0].keys
        return {
            "urls": [address.url for address in self.addresses],
            "keys": str(keys) if keys else None,
            "private": str(self.private),
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> QueueDirectory:
        """Return the directory that a document describes."""
        keys = Path(document["keys"]) if document["keys"] else None
        return cls(tuple(Address(url, None, keys) for url in document["urls"]), Path(document["private"]))

    def remove(self) -> None:
        """Remove the directory and all that is in it."""
        shutil.rmtree(self.private, ignore_errors=True)


def _addresses(spec: RunSpec, private: Path) -> tuple[Address, ...]:
    nodes = spec.workers.nodes
    if spec.workers.launcher == "ray":
        create_keys(private / KEYS)
        return (Address(QUEUE_PLACEHOLDER, None, Path(KEYS_PLACEHOLDER)),) * nodes
    numbers = [f"-{node}" for node in range(nodes)] if nodes > 1 else [""]
    return tuple(Address.parse(f"ipc://{private / SOCKET}{number}") for number in numbers)


def create_keys(directory: Path) -> None:
    """Create one key pair for a run's queues and one for their clients, in one directory.

    Raises:
        InputError: It cannot be written.
    """
    create_queue_keys(directory)
    client = create_client_keys(directory)
    shutil.copy(client, directory / CLIENTS / client.name)


@contextmanager
def sole_writer(output: Path, run_id: str) -> Iterator[None]:
    """Lock a run's output directory against any other run.

    Raises:
        OccupiedError: Another run writes there, or processes that a control plane has left.
        XtokenError: It cannot be created.
    """
    with sole_owner(output):
        _check_left_processes(output, run_id)
        yield


@dataclass(frozen=True)
class OutputBefore:
    """State of a run's output directory before its start: what a refused start has put there is removed again.

    Attributes:
        path: The directory.
        is_unused: It did not exist, or had only what can be made again.
        stays: It was there before; a refused start only empties it.
    """

    path: Path
    is_unused: bool
    stays: bool

    @classmethod
    def of(cls, output: Path) -> OutputBefore:
        """Return the state of a directory."""
        try:
            names = {path.name for path in output.iterdir()}
        except OSError:
            return cls(output, not output.exists(), stays=False)
        return cls(output, names <= {"cache"}, stays=True)

    def discard(self) -> None:
        """Remove what a refused start has made, unless a run has begun there, or another one writes there."""
        if not self.is_unused:
            return
        with suppress(XtokenError, OSError), sole_owner(self.path):
            if (self.path / SPEC).exists():
                return
            for path in self.path.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if not self.stays:
                self.path.rmdir()


def _check_left_processes(output: Path, run_id: str) -> None:
    """Refuse an output to which workers still write although their supervisor, and with it the lock, is gone."""
    # A run may always find its own processes again, whatever they have written into its record.
    if (read_json(output / FILE) or {}).get("run") == run_id:
        return
    record = read_record(output)
    if record.run is None:
        return
    identities = [Identity.from_document(worker.identity) for worker in record.workers.values() if worker.identity]
    running = [str(process.pid) for process in identities if process is not None and process.alive]
    if running:
        raise OccupiedError(
            f"processes of the run {record.run} still write to {output} ({', '.join(running)}): restart its control "
            "plane, which takes them over, or choose another output"
        )
