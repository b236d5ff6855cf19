"""Partitions of a queue that is started by hand. That of a run opens runs only, and loads no other kind."""

from __future__ import annotations

from xtoken_core.queue.engine import run_partition
from xtoken_core.queue.partition import Partition
from xtoken_core.queue.sessions import Sessions
from xtoken_core.queue.tasks.partition import TaskPartition
from xtoken_core.wire import messages as m


def any_partition(definition: m.OpenPartition, sessions: Sessions) -> Partition:
    """Return the partition that a message opens: of a run, or with tasks of its own."""
    return (TaskPartition if definition.run is None else run_partition)(definition, sessions)
