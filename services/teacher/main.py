"""`xtoken teacher`: connect to a queue, load one teacher, and serve its rank until the run ends."""

from __future__ import annotations

import logging
from typing import Any

import torch

from services.common.http_engine.factory import open_engine
from services.common.memory_estimate import check_room, check_teacher, weight_bytes
from services.common.models import load_model, nth_gpu, pick_device, takes_gpu
from services.common.step_plan import ring_shape, topk_settings
from services.common.tokenizers import load_tokenizer, pad_id
from services.common.worker import QueueLink, Worker, worker_session
from services.teacher.fp8 import check_fp8, swap_linears
from services.teacher.loop import ServedLoop, TeacherLoop
from services.teacher.model import TeacherModel
from services.teacher.served import ServedTeacher
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.queue.run.names import TEACHER
from xtoken_core.tokenizing import TextTokenizer
from xtoken_core.transports import sweep
from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
from xtoken_core.transports.factory import pick_transport

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
        if settings.store is not None:
            raise ConfigError(f"--teacher {teacher}: its output is read from a store (teacher.{teacher}.store)")
        for leftover in sweep():
            log.warning("removed %s, left behind by a process that is gone", leftover)
        device = device_of(spec, teacher, rank)
        transport = pick_transport(spec.workers.transport_name, device)
        tokenizer = load_tokenizer(settings.tokenizer_dir, spec.teacher_name(teacher))
        if settings.url:
            serve_url(worker, teacher, rank, device, transport, tokenizer)
            return
        worker.activity("loading the model")
        model = prepared_model(worker.run, teacher, device, transport)
        worker.alive()
        worker.phase("run")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        log.info("%s loaded from %s on %s", spec.teacher_name(teacher), settings.model, device)
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
        model.check(text, longest=settings.context_length, own_suffices=own_suffices)
        worker.phase("run")
        log.info("%s is served at %s", what, ", ".join(settings.url))
        ServedLoop(worker, model, transport, teacher=teacher, rank=rank, pad_id=pad_id(tokenizer)).serve()
    finally:
        model.close()


def device_of(spec: RunSpec, teacher: int, rank: int) -> torch.device:
    """Return the device of a rank's teacher: its student's, or the GPU that `teacher.gpu` names."""
    device, gpu = spec.workers.device, spec.teacher[teacher].gpu
    if gpu is None or not takes_gpu(device):
        return pick_device(device, rank)
    return nth_gpu(gpu + rank, f"{spec.teacher_name(teacher)} of rank {rank} (teacher.gpu = {gpu})")


def prepared_model(run: ResolvedRun, teacher: int, device: torch.device, transport: str) -> TeacherModel:
    """Load a teacher and apply its settings, if it fits its device.

    Raises:
        ConfigError: It does not fit, or the device lacks what the settings need.
        InputError: It cannot be loaded.
    """
    spec, what = run.spec.teacher[teacher], run.spec.teacher_name(teacher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if spec.fp8:
        check_fp8(device, spec.dtype, what)
    weights = weight_bytes(spec.model, spec.dtype)
    check_room(run, device)
    check_teacher(device, weights, ring_shape(run, teacher), what, ring_on_device=transport == CUDA_IPC)
    model = load_model(spec, what, device, packed=run.packed)
    if spec.fp8:
        count = swap_linears(model.base_model)
        if not count:
            raise ConfigError(f"{what}: fp8 finds no linear layer whose sides are multiples of 16: set fp8 = false")
        log.info("%s: %d linear layers in 8 bits", what, count)
    return TeacherModel(model, compiled=spec.compile, longest=spec.context_length)
