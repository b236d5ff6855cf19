"""The node groups of a run as its supervisor sees them: a queue each, and what it tells."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from services.supervisor.launchers.local import Launcher
from services.supervisor.process_group import Group
from services.supervisor.process_spec import Member
from services.supervisor.queue_monitor import Observer
from xtoken_core.data_plane.address import Address


class Site:
    """One node group.

    Attributes:
        node: Its number.
        queue: The group of one process that serves its queue.
        observer: The supervisor's session there.
    """

    def __init__(self, node: int, queue: Group, observer: Observer) -> None:
        self.node, self.queue, self.observer = node, queue, observer


class Sites:
    """All of a run's.

    Args:
        queues: The groups that serve the queues, in the order of their nodes.
        planned: The queues' addresses, likewise.
        launcher: Knows what of an address only a machine decides.
        step: Where the run goes on.

    Attributes:
        step: The first step that is not done everywhere, as far as anybody knows.
    """

    def __init__(self, queues: Sequence[Group], planned: Sequence[Address], launcher: Launcher, step: int = 0) -> None:
        self._launcher = launcher
        self.step = step
        self._sites = [
            Site(node, queue, Observer(partial(launcher.queue, node, address)))
            for node, (queue, address) in enumerate(zip(queues, planned, strict=True))
        ]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __getitem__(self, node: int) -> Site:
        return self._sites[node]

    def where(self, node: int) -> str:
        """Which machine a node is on, in words; empty if that goes without saying."""
        return self._launcher.where(node)

    def connected(self, nodes: Collection[int] | None = None) -> bool:
        """Whether the queues of these nodes, or all, have answered since they were started."""
        return all(site.observer.connected for site in self if nodes is None or site.node in nodes)

    def look(self) -> set[int]:
        """Read every queue's counts; the nodes of those that answered."""
        answered = {site.node for site in self if site.observer.look()}
        # A queue knows no step before a trainer has told it where the run goes on.
        known = [site.observer.run["step"] for site in self if site.observer.run.get("rewinds")]
        self.step = min(known, default=self.step)
        return answered

    @property
    def failed(self) -> str:
        """Why a queue says that the run was given up; empty if none does."""
        return next((str(why) for site in self if (why := site.observer.run.get("failed"))), "")

    def ended(self, nodes: Collection[int] | None = None) -> bool:
        """Whether every position of these nodes, or of all, is done."""
        return all(site.observer.run.get("ended") for site in self if nodes is None or site.node in nodes)

    def silent_for(self, site: Site) -> float:
        """Seconds since a connected queue has last answered; 0 if it is not connected."""
        observer = site.observer
        return time.monotonic() - observer.answered_at if observer.connected else 0.0

    def document(self) -> dict[str, Any]:
        """What the queues hold, and what they could not train, added up; sizes are bytes."""
        partitions = [site.observer.partition for site in self]
        runs = [site.observer.run for site in self]
        tasks: dict[str, Counter[str]] = {}
        for partition in partitions:
            for task, counts in partition.get("tasks", {}).items():
                tasks.setdefault(task, Counter()).update(counts)
        return {
            "step": self.step,
            "skipped": sum(run.get("skipped", 0) for run in runs),
            "dead": sum(partition.get("dead", 0) for partition in partitions),
            "queue": {
                "samples": sum(partition.get("samples", 0) for partition in partitions),
                "bytes": sum(site.observer.stats.get("bytes", 0) for site in self),
                "memory_limit": sum(site.observer.stats.get("memory_limit", 0) for site in self),
                "tasks": {task: dict(counts) for task, counts in tasks.items()},
            },
        }

    def leased(self, member: Member) -> str:
        """What a worker's kind holds, for the message that ends the run."""
        observer = self[member.node].observer
        if member.kind == "collator":
            blocks = observer.run.get("blocks_leased", 0)
            return f" (collators hold {blocks} block{'s' if blocks != 1 else ''} of positions)"
        ids = observer.leased(member.task) if member.task else []
        return f" (leased: {', '.join(map(str, ids))})" if ids else ""

    def give_up(self, reason: str) -> None:
        """Tell every worker, through its queue, that the run has ended; best effort."""
        for site in self:
            site.observer.give_up(reason)

    def close(self) -> None:
        """Say bye to all."""
        for site in self:
            site.observer.close()
