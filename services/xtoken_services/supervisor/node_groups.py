"""The node groups of a run: a queue each, and the supervisor's view of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from xtoken_core.data_plane.address import Address
from xtoken_services.common.run.status import QueueStatus, WorkerStatus
from xtoken_services.supervisor.launchers.base import Launcher
from xtoken_services.supervisor.process_group import ManagedProcess, ProcessGroup
from xtoken_services.supervisor.process_spec import ProcessSpec
from xtoken_services.supervisor.queue_monitor import QueueMonitor, find_session
from xtoken_services.supervisor.writer_progress import WriterProgress


class NodeGroup:
    """One node group.

    Attributes:
        node: Its number.
        queue: The process group that serves its queue.
        monitor: The supervisor's session on that queue.
    """

    def __init__(self, node: int, queue: ProcessGroup, monitor: QueueMonitor) -> None:
        self.node, self.queue, self.monitor = node, queue, monitor


class NodeGroups:
    """All node groups of a run.

    Args:
        queues: The process groups that serve the queues, in the order of their nodes.
        planned: The queues' addresses, in the same order.
        launcher: Fills in what of an address only the machine decides.
        step: The step that the run resumes from.
        writers: What processes without a queue have done; None: queues know it.

    Attributes:
        step: The first step that is not done on every node, as last polled.
    """

    def __init__(
        self,
        queues: Sequence[ProcessGroup],
        planned: Sequence[Address],
        launcher: Launcher,
        step: int = 0,
        writers: WriterProgress | None = None,
    ) -> None:
        self._launcher, self._writers = launcher, writers
        self.step = step
        self._nodes = [
            NodeGroup(node, queue, QueueMonitor(partial(launcher.queue_address, node, address)))
            for node, (queue, address) in enumerate(zip(queues, planned, strict=writers is None))
        ]

    def __iter__(self) -> Iterator[NodeGroup]:
        return iter(self._nodes)

    def __getitem__(self, node: int) -> NodeGroup:
        return self._nodes[node]

    def machine(self, node: int) -> str:
        """Return a node's machine in words; empty for this machine."""
        return self._launcher.machine(node)

    def connected(self, nodes: Collection[int] | None = None) -> bool:
        """Return whether the queues of these nodes, or all, have answered since they were started."""
        return all(group.monitor.connected for group in self if nodes is None or group.node in nodes)

    def poll(self) -> set[int]:
        """Read every queue's statistics and return the nodes whose queue answered."""
        answered = {group.node for group in self if group.monitor.poll()}
        # A restarted queue counts from step 0 until a trainer has rewound it to its checkpoint.
        steps = [group.monitor.run["step"] for group in self if group.monitor.run.get("rewinds")]
        self.step = self._writers.steps_done() if self._writers is not None else min(steps, default=self.step)
        return answered

    @property
    def failure(self) -> str:
        """Reason for which a queue has given up the run; empty if none has."""
        return next((str(reason) for group in self if (reason := group.monitor.run.get("failed"))), "")

    def ended(self, nodes: Collection[int] | None = None) -> bool:
        """Return whether every position of these nodes, or of all, is done."""
        return all(group.monitor.run.get("ended") for group in self if nodes is None or group.node in nodes)

    def silent_for(self, group: NodeGroup) -> float:
        """Return the seconds since a connected queue has last answered; 0 if it is not connected."""
        monitor = group.monitor
        return time.monotonic() - monitor.answered_at if monitor.connected else 0.0

    def totals(self) -> dict[str, Any]:
        """Sum the contents of all queues, and the numbers of skipped and dead samples, by the fields of `RunStatus`."""
        partitions = [group.monitor.partition for group in self]
        runs = [group.monitor.run for group in self]
        tasks: dict[str, Counter[str]] = {}
        for partition in partitions:
            for task, counts in partition.get("tasks", {}).items():
                tasks.setdefault(task, Counter()).update(counts)
        return {
            "step": self.step,
            "skipped": sum(run.get("skipped", 0) for run in runs),
            "dead": sum(partition.get("dead", 0) for partition in partitions),
            "queue": QueueStatus(
                samples=sum(partition.get("samples", 0) for partition in partitions),
                bytes=sum(group.monitor.stats.get("bytes", 0) for group in self),
                memory_limit=sum(group.monitor.stats.get("memory_limit", 0) for group in self),
                tasks={task: dict(counts) for task, counts in tasks.items()},
            )
            if self._nodes
            else None,
        }

    def worker_status(self, group: ProcessGroup, process: ManagedProcess) -> WorkerStatus:
        """Return a process's status: what its group knows, and what it last reported to its queue."""
        stats = self._nodes[process.spec.node].monitor.stats if self._nodes else {}
        session = find_session(stats, process.spec.name, group.incarnation) or {}
        return WorkerStatus(
            name=process.spec.name,
            kind=group.kind,
            state=group.state,
            pid=process.pid,
            incarnation=group.incarnation,
            restarts=group.restarts,
            exit_code=process.exit_code,
            phase=session.get("phase", "") if self._writers is None else self._writers.phase(process.spec.name),
            activity=session.get("activity", ""),
            progress=session.get("progress", 0),
            heartbeat_age_s=session.get("seen_age_s"),
            where=self.machine(process.spec.node),
        )

    def leases(self, spec: ProcessSpec) -> str:
        """Describe the leases of a kind of worker, for the message that ends the run."""
        if not self._nodes:
            return ""
        monitor = self[spec.node].monitor
        if spec.kind == "collator":
            blocks = monitor.run.get("blocks_leased", 0)
            return f" (collators hold {blocks} block{'s' if blocks != 1 else ''} of positions)"
        ids = monitor.leased(spec.task) if spec.task else []
        return f" (leased: {', '.join(map(str, ids))})" if ids else ""

    def give_up(self, reason: str) -> None:
        """End the run for every worker, through its queue; best effort."""
        for group in self:
            group.monitor.give_up(reason)

    def close(self) -> None:
        """Close all sessions."""
        for group in self:
            group.monitor.close()
