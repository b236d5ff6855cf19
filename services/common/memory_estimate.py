"""Whether a GPU has room for what a run keeps on it, looked at before anything is loaded; activations come on top."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.step_plan import ring_shape
from services.common.supervised import supervised
from services.common.weights import weight_count
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
from xtoken_core.transports.factory import pick_transport
from xtoken_core.transports.ring import RingShape
from xtoken_core.wire.columns import ITEM_SIZES

log = logging.getLogger("xtoken.budget")

GIB = 1 << 30
FLOAT32 = ITEM_SIZES["float32"]
KINDS = 4
"""Of what a student keeps per weight: itself, its gradient, AdamW's two moments."""
BETWEEN_STEPS = KINDS - 1
"""Without the gradient, which is dropped at a step's end."""
WAYS_OUT = (
    "give teachers a GPU of their own (teacher.gpu), lower workers.slots or train.micro_batch_tokens, share the "
    'student among ranks (train.parallel = "fsdp"), or train without float32 masters (train.master_weights = false)'
)
FEWER_SLOTS = "lower train.samples_per_step, all of whose signals select_teacher holds at once"
WAYS_OUT_OF_READING = f"set eval.teacher_kl = false, or {WAYS_OUT}"
"""Where it is the teachers beside the student that are too much."""


@dataclass(frozen=True)
class Need:
    """A part of a GPU's memory that a run takes for as long as it trains, or reads its held-out text."""

    what: str
    nbytes: int


def weight_bytes(directory: Path, dtype: str) -> int:
    """Bytes of a model's weights once they are loaded in a dtype."""
    return weight_count(directory) * ITEM_SIZES[dtype]


def student_bytes(spec: RunSpec, *, kinds: int = KINDS) -> int:
    """Bytes of a rank's weights, gradients and moments; of adapters and their state nothing is counted.

    Args:
        spec: The run's settings.
        kinds: How many of these there are per weight: `KINDS`, or `BETWEEN_STEPS`.
    """
    weights = weight_bytes(spec.student.model, spec.student.dtype)
    if spec.train.lora is not None:
        return weights
    in_float32 = weights // ITEM_SIZES[spec.student.dtype] * FLOAT32 * kinds
    masters = spec.train.master_weights and spec.student.dtype != "float32"
    if masters and sharing(spec) == 1:
        return in_float32 + weights
    return (in_float32 if masters else kinds * weights) // sharing(spec)


def sharing(spec: RunSpec) -> int:
    """How many ranks share one student: 1 where each has it whole."""
    return spec.workers.nodes * spec.workers.ranks if spec.train.parallel == "fsdp" else 1


def loads_teachers(run: ResolvedRun, rank: int) -> bool:
    """Whether a rank of this node group loads the teachers beside its student to read the held-out text."""
    if run.spec.eval is None or not run.spec.eval.teacher_kl:
        return False
    return sharing(run.spec) > 1 or run.group == rank == 0


def needs_of(run: ResolvedRun, gpu: int, gpus: int, *, rings: bool, reading: bool = False) -> Iterator[Need]:
    """What a node group's processes keep on one of its GPUs.

    Args:
        run: The run.
        gpu: Which, from 0.
        gpus: How many there are; ranks beyond them begin at the first one again.
        rings: Whether the teachers' rings are on their GPUs.
        reading: While the held-out text is read, not while a step is trained.
    """
    spec = run.spec
    for rank in range(spec.workers.ranks):
        of_rank = f" of rank {rank}" if spec.workers.ranks > 1 else ""
        if rank % gpus == gpu:
            beside = reading and loads_teachers(run, rank)
            yield Need(f"the student's state{of_rank}", student_bytes(spec, kinds=BETWEEN_STEPS if beside else KINDS))
            for number, teacher in enumerate(spec.teacher if beside else ()):
                what = f"teacher {number}'s weights beside the student{of_rank} while the held-out text is read"
                yield Need(what, weight_bytes(teacher.model, teacher.dtype))
        for number, teacher in enumerate(spec.teacher):
            if (rank if teacher.gpu is None else teacher.gpu + rank) % gpus != gpu:
                continue
            weights = weight_bytes(teacher.model, teacher.dtype)
            yield Need(f"teacher {number}'s weights{of_rank}", weights // 2 if teacher.fp8 else weights)
            if rings:
                shape = ring_shape(run, number)
                yield Need(f"its signal's {shape.slots} slots", shape.memory_bytes)


def check_room(run: ResolvedRun, device: torch.device) -> None:
    """Refuse a run that keeps more on a GPU than the GPU has, in a step or while it reads its held-out text.

    Workers that somebody has started by hand may each see other GPUs under the same number: they are only warned.

    Raises:
        ConfigError: With what is kept there.
    """
    if device.type != "cuda":
        return
    rings = pick_transport(run.spec.workers.signal, device) == CUDA_IPC
    why = shortage(run, device.index, torch.cuda.device_count(), torch.cuda.mem_get_info(device)[1], rings=rings)
    if why and supervised():
        raise ConfigError(why)
    if why:
        log.warning("%s", why)


def shortage(run: ResolvedRun, gpu: int, gpus: int, total: int, *, rings: bool) -> str:
    """Why a GPU of so many bytes cannot hold what a run keeps there; empty if it can. Arguments as for `needs_of`."""
    where = f"cuda:{gpu}"
    trained, read = (list(needs_of(run, gpu, gpus, rings=rings, reading=reading)) for reading in (False, True))
    holds_a_step = rings and run.spec.ring_slots > run.spec.workers.slots
    fewer = f"{FEWER_SLOTS}, " if holds_a_step else ""
    return too_much(trained, total, where, fewer + WAYS_OUT) or too_much(read, total, where, WAYS_OUT_OF_READING)


def too_much(needs: list[Need], total: int, where: str, ways_out: str = WAYS_OUT) -> str:
    """Why these needs cannot be met by so many bytes; empty if they can."""
    asked = sum(need.nbytes for need in needs)
    if asked <= total:
        return ""
    parts = ", ".join(f"{need.what} {need.nbytes / GIB:.2f}" for need in needs)
    return (
        f"{where} has {total / GIB:.2f} GiB, the run keeps {asked / GIB:.2f} there before any activation ({parts}): "
        f"{ways_out}"
    )


def check_teacher(device: torch.device, weights: int, shape: RingShape, what: str, *, ring_on_device: bool) -> None:
    """Refuse a teacher that cannot fit its GPU beside what is there already.

    Args:
        device: Where it will be; nothing is looked at on a CPU.
        weights: Bytes of its weights.
        shape: Of its ring.
        what: The teacher, for the error.
        ring_on_device: Whether the ring is on the GPU too.

    Raises:
        ConfigError: With what is needed and what is free.
    """
    if device.type != "cuda":
        return
    ring = shape.memory_bytes if ring_on_device else 0
    free, total = torch.cuda.mem_get_info(device)
    if weights + ring > free:
        raise ConfigError(
            f"{what} needs {(weights + ring) / GIB:.2f} GiB on {device} (weights {weights / GIB:.2f}, {shape.slots} "
            f"slots of its signal {ring / GIB:.2f}), {free / GIB:.2f} of {total / GIB:.2f} GiB are free: lower "
            'workers.slots or train.micro_batch_tokens, send hidden states (workers.signal = "cuda_ipc_hidden"), or '
            "give it another GPU"
        )
