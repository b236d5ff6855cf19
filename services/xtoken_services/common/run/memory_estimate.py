"""Estimate of the memory of GPUs that a run needs before any activation. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec, TeacherSpec
from xtoken_core.errors import ConfigError
from xtoken_core.transports.ring import RingShape
from xtoken_core.wire.columns import ITEM_SIZES
from xtoken_services.common.batches.step_plan import ring_shape
from xtoken_services.common.models.weights import weight_count
from xtoken_services.common.processes.supervised import supervised
from xtoken_services.common.run.memory_values import BLOCK_ROWS, COPIES, FLOAT32, GIB, state_bytes

if TYPE_CHECKING:  # workers have imported it, a start has no need of it
    import torch

    from xtoken_core.losses.base import Loss

log = logging.getLogger("xtoken.memory")

COPIES_BETWEEN_STEPS = COPIES - 1
"""Without the gradient, which is freed at a step's end."""
NF4_BITS = 9
"""Half bits of a weight in NormalFloat 4: one of 4 bits, and a float32 scale for 64 of them."""
REMEDIES = (
    "give teachers a GPU of their own (teacher.gpu), lower workers.slots or train.micro_batch_tokens, share the "
    'student among ranks (train.parallel = "fsdp"), or train without float32 masters (train.master_weights = false)'
)
FEWER_SLOTS = "lower train.samples_per_step, all of whose signals select_teacher holds at once"
REMEDIES_FOR_EVALUATION = f"set eval.teacher_kl = false, or {REMEDIES}"
"""If the teachers beside the student are too much."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory that one part of a run takes on a GPU."""

    what: str
    nbytes: int


def weight_bytes(directory: Path, dtype: str) -> int:
    """Return the bytes of a model's weights in a dtype."""
    return weight_count(directory) * ITEM_SIZES[dtype]


def teacher_bytes(teacher: TeacherSpec) -> int:
    """Return the bytes of a teacher's weights while it runs; those that are not quantized count as if they were."""
    if teacher.nf4:
        return weight_count(teacher.model) * NF4_BITS // 16
    weights = weight_bytes(teacher.model, teacher.dtype)
    return weights // 2 if teacher.fp8 else weights


def student_bytes(spec: RunSpec, *, copies: int = COPIES) -> int:
    """Return the bytes of a rank's weights, gradients and moments; adapters and their state are not counted.

    Args:
        spec: The run's settings.
        copies: Values per weight with AdamW: `COPIES`, or `COPIES_BETWEEN_STEPS`.
    """
    count, item, train = weight_count(spec.student.model), ITEM_SIZES[spec.student.dtype], spec.train
    if train.lora is not None:
        return count * item
    whole = state_bytes(count, item, train.optimizer, masters=train.master_weights, copies=copies)
    if shards(spec) == 1:
        return whole
    # With float32 masters a sharded student has no other weights.
    return (whole - count * item if train.master_weights and item < FLOAT32 else whole) // shards(spec)


def shards(spec: RunSpec) -> int:
    """Return the number of ranks that one student is sharded over; 1 without sharding."""
    return spec.workers.nodes * spec.workers.ranks if spec.train.parallel == "fsdp" else 1


def loads_teachers(run: ResolvedRun, rank: int) -> bool:
    """Return whether a rank of this node group loads the teachers beside its student for evaluation."""
    if run.spec.eval is None or not run.spec.eval.teacher_kl:
        return False
    return shards(run.spec) > 1 or run.group == rank == 0


def memory_uses(run: ResolvedRun, gpu: int, gpus: int, *, rings: bool, evaluates: bool = False) -> Iterator[MemoryUse]:
    """Yield the memory that a node group's processes take on one of its GPUs, part by part.

    Args:
        run: The run.
        gpu: Number of the GPU, from 0.
        gpus: Number of GPUs; rank r is on GPU r modulo this.
        rings: The teachers' rings are on their GPUs.
        evaluates: During an evaluation instead of a training step.
    """
    spec = run.spec
    for rank in range(spec.workers.ranks):
        of_rank = f" of rank {rank}" if spec.workers.ranks > 1 else ""
        if rank % gpus == gpu:
            beside = evaluates and loads_teachers(run, rank)
            yield MemoryUse(
                f"the student's state{of_rank}", student_bytes(spec, copies=COPIES_BETWEEN_STEPS if beside else COPIES)
            )
            for number, teacher in enumerate(spec.teacher if beside else ()):
                what = (
                    f"{spec.teacher_name(number)}'s weights beside the student{of_rank} while the held-out text is read"
                )
                yield MemoryUse(what, weight_bytes(teacher.model, teacher.dtype))
        for number, teacher in enumerate(spec.teacher):
            parts = [part for part in range(teacher.gpus) if teacher.gpu_index(rank, part) % gpus == gpu]
            if not parts:
                continue
            if teacher.loads_model:
                weights = teacher_bytes(teacher) * len(parts) // teacher.gpus
                yield MemoryUse(f"{spec.teacher_name(number)}'s weights{of_rank}", weights)
            if rings and 0 in parts and not spec.fills_on_host(number):
                shape = ring_shape(run, number)
                yield MemoryUse(f"its signal's {shape.slots} slots", shape.memory_bytes)
    yield from _rollout_uses(spec, gpu, gpus)


def _rollout_uses(spec: RunSpec, gpu: int, gpus: int) -> Iterator[MemoryUse]:
    """Yield the weights that rank 0 publishes and those that rollout workers generate with; caches come on top."""
    if spec.rollout is None or spec.rollout.url:
        return
    if gpu == 0 and spec.rollout.weights == "auto":
        yield MemoryUse("the published weights", weight_bytes(spec.student.model, spec.student.dtype))
    for number in range(spec.rollout.workers):
        if number % gpus == gpu:
            yield MemoryUse(f"rollout worker {number}'s weights", weight_bytes(spec.student.model, spec.student.dtype))


def custom_loss_memory(run: ResolvedRun, losses: Sequence[Loss], student_vocab_size: int) -> list[MemoryUse]:
    """Return the memory of custom losses beside both sides' logits; one that does not declare it is logged.

    Teachers are compared one after the other, and the largest counts.

    Args:
        run: The run.
        losses: One per teacher.
        student_vocab_size: `V_s`.
    """
    positions = run.spec.train.micro_batch_tokens
    if run.spec.student.blockwise_head:
        positions = min(positions, BLOCK_ROWS)
    uses = []
    for loss in losses:
        if run.spec.loss.mode_of(loss.index) != "custom":
            continue
        each = loss.bytes_per_position(student_vocab_size, loss.vocab_size)
        if each is None:
            log.warning(
                "%s declares no bytes_per_position: a micro-batch may need more memory than the GPU has",
                type(loss).__name__,
            )
        else:
            uses.append(MemoryUse(f"{type(loss).__name__} on {positions} positions", each * positions))
    return sorted(uses, key=lambda use: -use.nbytes)[:1]


def check_room(run: ResolvedRun, device: torch.device, further: Sequence[MemoryUse] = ()) -> None:
    """Refuse a run that keeps more on a GPU than the GPU has, in a step or in an evaluation.

    Workers without a supervisor may each see other GPUs under the same number: they only log a warning.

    Args:
        run: The run.
        device: The GPU; of a CPU the host's memory was checked before the start.
        further: What a step needs beside what `memory_uses` yields.

    Raises:
        ConfigError: It needs more; the text lists the parts.
    """
    if device.type != "cuda":
        return
    import torch

    from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
    from xtoken_core.transports.factory import pick_transport

    rings = pick_transport(run.spec.workers.transport, device) == CUDA_IPC
    total = torch.cuda.mem_get_info(device)[1]
    why = memory_shortage(run, device.index, torch.cuda.device_count(), total, rings=rings, further=further)
    if why and supervised():
        raise ConfigError(why)
    if why:
        log.warning("%s", why)


def memory_shortage(
    run: ResolvedRun, gpu: int, gpus: int, total: int, *, rings: bool, further: Sequence[MemoryUse] = ()
) -> str:
    """Return why a GPU cannot hold what a run keeps there; empty if it can.

    Args:
        run: The run.
        gpu: As for `memory_uses`.
        gpus: Likewise.
        total: The GPU's memory in bytes.
        rings: As for `memory_uses`.
        further: As for `check_room`.
    """
    where = f"cuda:{gpu}"
    step, evaluation = (list(memory_uses(run, gpu, gpus, rings=rings, evaluates=part)) for part in (False, True))
    holds_a_step = rings and run.spec.ring_slots > run.spec.workers.slots
    fewer = f"{FEWER_SLOTS}, " if holds_a_step else ""
    return exceeds_memory([*step, *further], total, where, fewer + REMEDIES) or exceeds_memory(
        evaluation, total, where, REMEDIES_FOR_EVALUATION
    )


def exceeds_memory(uses: list[MemoryUse], total: int, where: str, remedies: str = REMEDIES) -> str:
    """Return a message if the parts exceed `total` bytes together; empty if they do not."""
    needed = sum(use.nbytes for use in uses)
    if needed <= total:
        return ""
    parts = ", ".join(f"{use.what} {use.nbytes / GIB:.2f}" for use in uses)
    return (
        f"{where} has {total / GIB:.2f} GiB, the run keeps {needed / GIB:.2f} there before any activation ({parts}): "
        f"{remedies}"
    )


def check_teacher(device: torch.device, weights: int, shape: RingShape, what: str, *, ring_on_device: bool) -> None:
    """Refuse a teacher that does not fit into the free memory of its GPU.

    Args:
        device: Device of the teacher; a CPU is not checked.
        weights: Bytes of its weights.
        shape: Shape of its ring.
        what: Name of the teacher for the error.
        ring_on_device: The ring is on the GPU too.

    Raises:
        ConfigError: It does not fit; the text has the sizes.
    """
    if device.type != "cuda":
        return
    import torch

    uses = [MemoryUse(f"{what}'s weights", weights)]
    if ring_on_device:
        uses.append(MemoryUse(f"its signal's {shape.slots} slots", shape.memory_bytes))
    if why := exceeds_memory(uses, torch.cuda.mem_get_info(device)[0], f"the free memory of {device}", REMEDIES):
        raise ConfigError(why)
