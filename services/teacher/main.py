"""`xtoken teacher`: connect to a queue, load one teacher, and serve its rank until the run ends."""

from __future__ import annotations

import logging

import torch

from services.common.models import load_model, pick_device
from services.common.tokenizers import load_tokenizer, pad_id
from services.common.worker import QueueLink, worker_session
from services.teacher.loop import TeacherLoop
from xtoken_core.errors import ConfigError
from xtoken_core.protocol.run import TEACHER
from xtoken_core.teacher import sweep

log = logging.getLogger("xtoken.teacher")


def work(link: QueueLink, *, teacher: int, rank: int, name: str | None) -> None:
    """Serve one teacher to one rank.

    Raises:
        ConfigError: The run has no such teacher or rank.
        InputError: The model cannot be loaded, or its head is narrower than its vocabulary.
    """
    name = name or f"teacher-{teacher}-{rank}"
    with worker_session(link, role=TEACHER, name=name, rank=rank) as worker:
        spec = worker.run.spec
        if teacher >= len(spec.teacher) or rank >= spec.workers.ranks:
            raise ConfigError(
                f"--teacher {teacher} --rank {rank}: the run {spec.name!r} has {len(spec.teacher)} teachers "
                f"and {spec.workers.ranks} ranks"
            )
        mine = spec.teacher[teacher]
        for leftover in sweep():
            log.warning("removed %s, left behind by a process that is gone", leftover)
        device = pick_device(spec.workers.device, rank)
        model = load_model(mine, f"teacher {teacher}", device)
        model.eval()  # type: ignore[no-untyped-call]
        worker.alive()
        tokenizer = load_tokenizer(mine.tokenizer_dir, f"teacher {teacher}")
        worker.phase("run")
        log.info("teacher %d loaded from %s on %s", teacher, mine.model, device)
        with torch.inference_mode():
            TeacherLoop(worker, model, teacher=teacher, rank=rank, pad_id=pad_id(tokenizer)).serve()
