"""Budget of a queue: the memory that everything but the values of samples may take, by account.

Costs are estimates of what CPython needs, rounded up; `tests/contract/test_budget.py` compares them with a process. An
account has a fixed part of the budget, so that filling one locks no other out, and no part is ever raised.
"""

from __future__ import annotations

from typing import Literal

from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m

Account = Literal["samples", "partitions", "sessions", "waiting", "replies"]

# For the bookkeeping of a default run; the part of the memory limit is for larger spans.
BASE_BYTES = 64 << 20
PARTS: dict[Account, float] = {
    "samples": 1 / 2,
    "partitions": 1 / 8,
    "sessions": 1 / 8,
    "waiting": 1 / 8,
    "replies": 1 / 8,
}
RESULTS_FACTOR = 1.25
"""Results and the rows of leased blocks may exceed the account of samples by so much, or inputs could lock them out."""

SAMPLE_BYTES = 160
ENTRY_BYTES = 110
"""Per sample and table of columns: an entry in the table and one in its batch."""
QUEUED_BYTES = 90
"""Per sample and task with an order."""
LEASED_BYTES = 140
STATUS_BYTES = 60
"""Per task and combination of states."""
BATCH_BYTES = 800
COLUMN_BYTES = 1000
REASON_BYTES = 160
INTERVAL_BYTES = 100
VOLATILE_BYTES = 200
FIELD_BYTES = 600
SLOT_BYTES = 200
SESSION_BYTES = 2048
REQUEST_BYTES = 1500
REPLY_BYTES = 700
ID_BYTES = 48
PARTITION_BYTES = 1 << 14
NAME_BYTES = 300


class Budget:
    """Bytes used and allowed per account.

    Args:
        memory_limit: Limit of the samples' values; the budget grows with it.
    """

    def __init__(self, memory_limit: int) -> None:
        total = BASE_BYTES + memory_limit // 4
        self.limits: dict[Account, int] = {account: int(total * part) for account, part in PARTS.items()}
        self.bytes: dict[Account, int] = dict.fromkeys(PARTS, 0)

    @property
    def used(self) -> int:
        """Return the bytes of all accounts."""
        return sum(self.bytes.values())

    def add(self, account: Account, nbytes: int) -> None:
        """Charge an account, or credit it where `nbytes` is negative."""
        self.bytes[account] += nbytes

    def excess(self, account: Account, nbytes: int = 0) -> int:
        """Return the bytes by which an account would exceed its part with `nbytes` more; not above 0 if it has room."""
        return self.bytes[account] + nbytes - self.limits[account]

    def require(self, account: Account, nbytes: int, what: str, *, factor: float = 1.0) -> None:
        """Check that an account has room.

        Raises:
            QueueError: `no_room`.
        """
        allowed = int(self.limits[account] * factor)
        if self.bytes[account] + nbytes > allowed:
            raise QueueError(
                "no_room",
                f"{what} needs {nbytes} bytes of bookkeeping, of which {max(allowed - self.bytes[account], 0)} are "
                f"left for {account}: finish or clear some, or raise the memory limit",
                {"room": 0},
            )


def cost_of_put(rows: int, columns: int, tasks: int) -> int:
    """Return the bookkeeping of a put of so many rows and columns for so many tasks with an order."""
    return rows * (SAMPLE_BYTES + ENTRY_BYTES + tasks * QUEUED_BYTES) + BATCH_BYTES + columns * COLUMN_BYTES


def cost_of_definition(definition: m.OpenPartition) -> int:
    """Return the bookkeeping of a partition without samples."""
    names = [name for task in definition.tasks for name in (task.name, *task.requires)] + definition.volatile
    # The resolved run, which every welcome carries, is kept as bytes for the queue's lifetime.
    document = len(definition.run.document) if definition.run is not None else 0
    return PARTITION_BYTES + document + sum(NAME_BYTES + len(name) for name in names)


def cost_of_request(request: m.AnyRequest) -> int:
    """Return the memory of a request that waits."""
    ids, fields = getattr(request, "ids", ()), getattr(request, "fields", ())
    return REQUEST_BYTES + ID_BYTES * len(ids) + sum(NAME_BYTES + len(name) for name in fields)


def cost_of_reply(reply: m.Reply) -> int:
    """Return the memory of a reply that is kept; its columns are not."""
    if not isinstance(reply, m.Claimed):
        return REPLY_BYTES
    return REPLY_BYTES + ID_BYTES * (len(reply.ids) + len(reply.dead))


def cost_of_reasons(count: int, characters: int) -> int:
    """Return the memory of a map of reasons."""
    return count * REASON_BYTES + characters


class ReasonMap(dict[int, str]):
    """Reasons by id; equal reasons are kept once.

    Attributes:
        characters: Length of all distinct reasons.
    """

    def __init__(self, reasons: dict[int, str] | None = None) -> None:
        super().__init__()
        self.characters = 0
        self._uses: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self.update(reasons or {})

    def __reduce__(self) -> tuple[type[ReasonMap], tuple[dict[int, str]]]:
        return ReasonMap, (dict(self),)

    @property
    def nbytes(self) -> int:
        """Return the memory of the map."""
        return cost_of_reasons(len(self), self.characters)

    def __setitem__(self, key: int, reason: str) -> None:
        if key in self:
            del self[key]
        if reason not in self._uses:
            self._uses[reason], self._texts[reason] = 0, reason
            self.characters += len(reason)
        self._uses[reason] += 1
        # The first copy of equal texts is the one that is kept: thousands of positions share a reason.
        super().__setitem__(key, self._texts[reason])

    def __delitem__(self, key: int) -> None:
        reason = self[key]
        super().__delitem__(key)
        self._uses[reason] -= 1
        if not self._uses[reason]:
            del self._uses[reason], self._texts[reason]
            self.characters -= len(reason)

    def update(self, reasons: dict[int, str]) -> None:  # type: ignore[override]
        """Set several reasons."""
        for key, reason in reasons.items():
            self[key] = reason

    def discard(self, key: int) -> None:
        """Remove a reason, if there is one."""
        if key in self:
            del self[key]

    def clear(self) -> None:
        """Remove every reason."""
        super().clear()
        self._uses.clear()
        self._texts.clear()
        self.characters = 0
