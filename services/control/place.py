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

from services.control.processes import Identity
from services.control.record import read_record
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import IPC_PATH_BYTES, Address, create_token
from xtoken_core.errors import XtokenError

SOCKET = "queue"


class OccupiedError(XtokenError):
    """Another run is writing to the same directory."""

    status = 409


@dataclass(frozen=True)
class QueuePlace:
    """Where a run's queue is.

    Attributes:
        private: A directory of this user alone, for the queue's socket and token.
    """

    address: Address
    private: Path

    @classmethod
    def make(cls, spec: RunSpec) -> QueuePlace:
        """A new one."""
        place = tempfile.gettempdir()
        longest = len(os.fsencode(place)) + len("/xtoken-12345678/") + len(SOCKET)
        private = Path(tempfile.mkdtemp(prefix="xtoken-", dir=None if longest <= IPC_PATH_BYTES else "/tmp"))
        return cls(_address_of(spec, private), private)

    def document(self) -> dict[str, Any]:
        """For the database."""
        token = self.address.token_file
        return {"url": self.address.url, "token_file": str(token) if token else None, "private": str(self.private)}

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> QueuePlace:
        """The opposite of `document`."""
        token = Path(document["token_file"]) if document["token_file"] else None
        return cls(Address.parse(document["url"], token), Path(document["private"]))

    def remove(self) -> None:
        """Nothing of it is left."""
        shutil.rmtree(self.private, ignore_errors=True)


def _address_of(spec: RunSpec, private: Path) -> Address:
    if spec.queue.address is None:
        return Address.parse(f"ipc://{private / SOCKET}")
    address = Address.parse(spec.queue.address)
    if address.ipc_path is not None:
        return address
    token = address.token_file or private / "token"
    create_token(token)
    return Address.parse(spec.queue.address, token)


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
