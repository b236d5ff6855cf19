"""Interface of launchers: they start processes somewhere and signal them, and attach to processes started earlier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from xtoken_core.errors import XtokenError
from xtoken_core.regular_files import read_below

if TYPE_CHECKING:
    from xtoken_core.data_plane.address import Address

UNKNOWN_EXIT = 255
"""Status of a process that exited without leaving one, while no parent could receive it."""
NODE_LOST_EXIT = 256
"""Status of a process whose machine is gone; no process can exit with it."""
STATUS_FILE = "XTOKEN_STATUS_FILE"
"""Variable with the file in which a worker leaves its exit status, for a supervisor that is not its parent."""
STATUS_LIMIT = 64
"""Largest size of that file in bytes."""


class NodeLostError(XtokenError):
    """The machine of a node group is gone; another one may replace it."""


class Handle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Process id on its machine."""

    @property
    def identity(self) -> dict[str, Any]:
        """Plain values by which `Launcher.attach` recognises the process."""

    def poll(self) -> int | None:
        """Return the process's exit status: -N after signal N, `UNKNOWN_EXIT` if it left none, None while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM to the process."""

    def kill(self) -> None:
        """Kill the process and everything that it started."""


class Launcher(Protocol):
    """Starts the processes of one run, each node group on a machine."""

    def ready(self, node: int, kind: str) -> bool:
        """Return whether processes of a kind and node group can be started now; never wait.

        Raises:
            XtokenError: They never will.
        """

    def machine(self, node: int) -> str:
        """Return the machine of a node group in words; empty for this machine."""

    def queue_address(self, node: int, planned: Address) -> Address | None:
        """Return the address of a node group's queue as seen from here; None while it has no machine.

        Args:
            node: Number of the node group.
            planned: Address from the specification, in which placeholders stand for what the machine decides.
        """

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, node: int = 0) -> Handle:
        """Start a command.

        Args:
            command: Program and arguments.
            env: The whole environment. It holds the attempt's mark (`supervised.MARK`), which is unique, and the file
                for its exit status (`STATUS_FILE`).
            log: File to which its output is appended.
            node: Number of its node group.

        Raises:
            OSError: It cannot be started.
            NodeLostError: The node group has no machine at present.
        """

    def attach(self, identity: dict[str, Any] | None, mark: str, status: Path, *, node: int = 0) -> Handle:
        """Return a handle of a process that was started before, running or not.

        Args:
            identity: Its handle's identity; None if that was never stored.
            mark: Its mark.
            status: File in which it leaves its exit status.
            node: Number of its node group.
        """

    def rendezvous(self, node: int = 0) -> Mapping[str, str]:
        """Return `MASTER_ADDR` and `MASTER_PORT`, at which the ranks of a trainer meet.

        Raises:
            NodeLostError: The node group has no machine at present.
        """

    def kill_marked(self, prefix: str) -> None:
        """Kill every process whose mark begins with a prefix."""

    def close(self) -> None:
        """Stop launching; processes that are not tied to this one keep running."""


def read_status(file: Path) -> int:
    """Return the exit status that a process has left in a file, `UNKNOWN_EXIT` if it left none."""
    try:
        return int(read_below(file.parent, file.name, STATUS_LIMIT))
    except (OSError, ValueError):
        return UNKNOWN_EXIT
