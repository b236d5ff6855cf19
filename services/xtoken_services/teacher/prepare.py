"""A teacher's devices, and its model with the settings that it runs with."""

from __future__ import annotations

import logging
from functools import partial

import torch
from transformers import PreTrainedModel

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec, TeacherSpec
from xtoken_core.errors import ConfigError
from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
from xtoken_services.common.batches.step_plan import ring_shape, topk_settings
from xtoken_services.common.models.loading import load_model, nth_gpu, pick_device, takes_gpu
from xtoken_services.common.run.memory_estimate import check_room, check_teacher, teacher_bytes, weight_bytes
from xtoken_services.teacher.fp8 import Fp8Linear, check_fp8
from xtoken_services.teacher.model import TeacherModel
from xtoken_services.teacher.quantized import QuantizedLinear, swap_linears

log = logging.getLogger("xtoken.teacher")


def device_of(spec: RunSpec, teacher: int, rank: int) -> torch.device:
    """Return the device of a rank's teacher: its student's, or the GPU that `teacher.gpu` names."""
    device, gpu = spec.workers.device, spec.teacher[teacher].gpu
    if gpu is None or not takes_gpu(device):
        return pick_device(device, rank)
    return nth_gpu(gpu + rank, f"{spec.teacher_name(teacher)} of rank {rank} (teacher.gpu = {gpu})")


def devices_of(spec: RunSpec, teacher: int, rank: int) -> list[torch.device]:
    """Return the devices of all parts of a rank's teacher, the ring's first.

    Raises:
        ConfigError: It is divided over more GPUs than there are.
    """
    settings = spec.teacher[teacher]
    if spec.fills_on_host(teacher):
        return [torch.device("cpu")]
    if settings.gpus == 1:
        return [device_of(spec, teacher, rank)]
    if not takes_gpu(spec.workers.device):
        return [torch.device("cpu")] * settings.gpus
    numbers = [settings.gpu_index(rank, part) for part in range(settings.gpus)]
    if numbers[-1] >= torch.cuda.device_count():
        raise ConfigError(
            f"{spec.teacher_name(teacher)} of rank {rank} takes GPUs {numbers[0]} to {numbers[-1]} (teacher.gpus = "
            f"{settings.gpus}), torch sees {torch.cuda.device_count()} here: lower teacher.gpus, teacher.gpu or "
            "workers.ranks"
        )
    return [torch.device("cuda", number) for number in numbers]


def prepared_model(run: ResolvedRun, teacher: int, device: torch.device, transport: str = "") -> TeacherModel:
    """Load a teacher, or this process's part of it, and apply its settings, if it fits its device.

    Args:
        run: The run.
        teacher: Number of the teacher.
        device: Its device.
        transport: Transport of its signal; empty in a process without a ring.

    Raises:
        ConfigError: It does not fit, or the device lacks what the settings need.
        InputError: It cannot be loaded.
    """
    spec, what = run.spec.teacher[teacher], run.spec.teacher_name(teacher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kind = _format(spec, device, what)
    by_layer = spec.nf4 and spec.gpus == 1  # its GPU never holds all weights in the dtype
    weights = teacher_bytes(spec) if by_layer else weight_bytes(spec.model, spec.dtype) // spec.gpus
    check_room(run, device)
    check_teacher(device, weights, ring_shape(run, teacher), what, ring_on_device=transport == CUDA_IPC)
    quantize = None if kind is None else partial(_quantize, spec=spec, what=what, kind=kind, device=device)
    on_host = quantize if by_layer else None
    model = load_model(spec, what, device, packed=run.packed, gpus=spec.gpus, on_host=on_host)
    if quantize is not None and on_host is None:
        quantize(model)
    content = run.spec.content_of(teacher)
    topk = topk_settings(run, teacher) if content == "topk" else None
    return TeacherModel(model, compiled=spec.compile, longest=spec.context_length, content=content, topk=topk)


def _quantize(
    model: PreTrainedModel, *, spec: TeacherSpec, what: str, kind: type[QuantizedLinear], device: torch.device
) -> None:
    """Replace the linear layers of a teacher's body by quantized ones on its device.

    Raises:
        ConfigError: None fits the format.
    """
    count = swap_linears(model.base_model, kind, device)
    if not count:
        raise ConfigError(
            f"{what}: {spec.quantized} finds no linear layer whose sides are multiples of {kind.MULTIPLES[1]}: set "
            f"{spec.quantized} = false"
        )
    log.info("%s: %d linear layers in %s", what, count, spec.quantized)


def _format(spec: TeacherSpec, device: torch.device, what: str) -> type[QuantizedLinear] | None:
    """Return the class of a teacher's quantized layers; None if they keep its dtype.

    Raises:
        ConfigError: The device, the dtype or this installation does not support it.
    """
    if spec.fp8:
        check_fp8(device, spec.dtype, what)
        return Fp8Linear
    if not spec.nf4:
        return None
    try:
        from xtoken_services.teacher.nf4 import Nf4Linear
    except ImportError as error:
        raise ConfigError(
            f"{what}: nf4 needs bitsandbytes ({error}): install it by pip install 'xtoken[bitsandbytes]'"
        ) from error
    return Nf4Linear
