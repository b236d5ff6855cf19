"""`xtoken teacher`: connect to a queue, open one teacher, and serve its rank until the run ends."""

from __future__ import annotations

import logging

import torch

from xtoken_core.errors import ConfigError
from xtoken_core.queue.run.names import TEACHER
from xtoken_core.transports import remove_stale_files
from xtoken_core.transports.factory import pick_transport
from xtoken_services.common.processes.worker import QueueLink, worker_session
from xtoken_services.teacher.held_out import measure_held_out
from xtoken_services.teacher.loop import TeacherLoop
from xtoken_services.teacher.opening import opened_teacher
from xtoken_services.teacher.prepare import devices_of

log = logging.getLogger("xtoken.teacher")


def work(link: QueueLink, *, teacher: int, rank: int, name: str | None) -> None:
    """Serve one teacher to one rank.

    Raises:
        ConfigError: The run has no such teacher or rank.
        InputError: The teacher cannot be opened, or its head is narrower than its vocabulary.
    """
    name = name or f"teacher-{teacher}-{rank}"
    with worker_session(link, role=TEACHER, name=name, rank=rank) as worker:
        spec = worker.run.spec
        if teacher >= len(spec.teacher) or rank >= spec.workers.ranks:
            raise ConfigError(
                f"--teacher {teacher} --rank {rank}: the run {spec.name!r} has {len(spec.teacher)} teachers "
                f"and {spec.workers.ranks} ranks"
            )
        for leftover in remove_stale_files():
            log.warning("removed %s, left behind by a process that is gone", leftover)
        device = devices_of(spec, teacher, rank)[0]
        transport = pick_transport(spec.workers.transport, device)

        def report(activity: str) -> None:
            worker.activity(activity)
            worker.waiting(activity)

        with opened_teacher(worker.run, teacher, rank, report, transport) as model:
            if (worker.run.group, rank) == (0, 0):  # the rank that writes the run's evaluations waits for it
                measure_held_out(worker.run, teacher, model, report)
            worker.phase("run")
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            TeacherLoop(worker, model, transport, teacher=teacher, rank=rank).serve()
