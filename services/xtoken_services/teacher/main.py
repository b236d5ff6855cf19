"""`xtoken teacher`: connect to a queue, load one teacher, and serve its rank until the run ends."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch

from xtoken_core.errors import ConfigError
from xtoken_core.queue.run.names import TEACHER
from xtoken_core.tokenizing import TextTokenizer
from xtoken_core.transports import remove_stale_files
from xtoken_core.transports.factory import pick_transport
from xtoken_services.common.batches.step_plan import topk_settings
from xtoken_services.common.http_engine.factory import open_engine
from xtoken_services.common.processes.worker import QueueLink, Worker, worker_session
from xtoken_services.common.run.memory_estimate import check_room
from xtoken_services.common.tokenizers.loading import load_tokenizer, pad_id
from xtoken_services.teacher.loop import ServedLoop, StoredLoop, TeacherLoop
from xtoken_services.teacher.prepare import devices_of, prepared_model
from xtoken_services.teacher.served import ServedTeacher
from xtoken_services.teacher.shards import send_tokens, started_shards
from xtoken_services.teacher.stored import StoredTeacher

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
        settings = spec.teacher[teacher]
        for leftover in remove_stale_files():
            log.warning("removed %s, left behind by a process that is gone", leftover)
        devices = devices_of(spec, teacher, rank)
        device, divided = devices[0], len(devices) > 1
        transport = pick_transport(spec.workers.transport, device)
        if settings.store is not None:
            serve_store(worker, teacher, rank, device, transport)
            return
        tokenizer = load_tokenizer(settings.tokenizer_dir, spec.teacher_name(teacher))
        if settings.url:
            serve_url(worker, teacher, rank, device, transport, tokenizer)
            return
        worker.activity("loading the model")
        with started_shards(worker.run, teacher, devices) if divided else nullcontext():
            model = prepared_model(worker.run, teacher, device, transport)
            if divided:
                model.before_forward = send_tokens
            worker.alive()
            worker.phase("run")
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            where = " and ".join(map(str, devices))
            log.info("%s loaded from %s on %s", spec.teacher_name(teacher), settings.model, where)
            with torch.inference_mode():
                loop = TeacherLoop(worker, model, transport, teacher=teacher, rank=rank, pad_id=pad_id(tokenizer))
                loop.serve()


def serve_url(worker: Worker, teacher: int, rank: int, device: torch.device, transport: str, tokenizer: Any) -> None:
    """Serve a teacher that another program computes, once its servers have been checked.

    Raises:
        EngineError: No server answers in time.
        EngineRefusalError: One runs another model, or cannot give what the loss needs.
    """
    run = worker.run
    spec, settings = run.spec, run.spec.teacher[teacher]
    what, text = spec.teacher_name(teacher), TextTokenizer(tokenizer, spec.teacher_name(teacher))
    check_room(run, device)
    engine = open_engine(settings, f"teacher.{teacher}", run.teachers[teacher].vocab_size, text)
    model = ServedTeacher(engine, device, topk_settings(run, teacher), run.teachers[teacher].head_width)
    try:
        worker.activity("checking the servers")
        needs_own = spec.loss.mode_of(teacher) == "alm" and not run.same_tokenizer[teacher]
        own_suffices = needs_own and spec.loss.dynamic_teacher_weights in (None, "ce")
        side = spec.student if run.same_tokenizer[teacher] else settings
        model.check(text, longest=side.context_length, own_suffices=own_suffices)
        worker.phase("run")
        log.info("%s is served at %s", what, ", ".join(settings.url))
        ServedLoop(worker, model, transport, teacher=teacher, rank=rank, pad_id=pad_id(tokenizer)).serve()
    finally:
        model.close()


def serve_store(worker: Worker, teacher: int, rank: int, device: torch.device, transport: str) -> None:
    """Serve a teacher whose output is in a store.

    Raises:
        StoreError: The store lacks what a micro-batch needs, or was built from something else.
    """
    worker.activity("opening the store")
    model = StoredTeacher(worker.run, teacher, device)
    try:
        worker.phase("run")
        log.info("%s is read from the store %s", worker.run.spec.teacher_name(teacher), model.store.files.name)
        StoredLoop(worker, model, transport, teacher=teacher, rank=rank).serve()
    finally:
        model.close()
