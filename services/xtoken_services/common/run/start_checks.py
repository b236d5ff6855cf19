"""The checks of a run before its start, which a dry run makes too: files, memory, disk. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, OutputError
from xtoken_services.common.batches.step_plan import ring_shape
from xtoken_services.common.run.machine import Machine, count_gpus
from xtoken_services.common.run.memory_estimate import (
    COPIES_BETWEEN_STEPS,
    MemoryUse,
    exceeds_memory,
    memory_uses,
    shards,
    student_bytes,
    teacher_bytes,
    weight_bytes,
)
from xtoken_services.common.run.memory_values import GIB
from xtoken_services.common.run.resolve import Progress, file_warnings, resolve_run
from xtoken_services.common.text.training_text import documents_of


def check_start(
    spec: RunSpec, progress: Progress | None = None, *, output: Path | None = None
) -> tuple[ResolvedRun, list[str]]:
    """Resolve a run, and refuse it if this machine cannot hold it.

    Args:
        spec: The run.
        progress: As of `resolve_run`.
        output: Where its checkpoints will be, if not in the specification's output.

    Returns:
        The run with what its files say; and lines to show before its start: an estimate of memory, and warnings.

    Raises:
        XtokenError: It is refused.
    """
    resolved = resolve_run(spec, progress)
    memory = [check_host(resolved, Machine.of_this())] if spec.workers.launcher == "local" else []
    _check_disk(resolved, output or spec.output)
    return resolved, [*memory, *_forms(resolved.spec), *file_warnings(resolved)]


def _forms(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each file of the text whose records were recognised as a form of conversations."""
    for location, form in (found for text in documents_of(spec) for found in text.conversations()):
        if form:
            yield f"text: {location} is a record of {form}, and is read as messages, as is every other such record"


def host_uses(run: ResolvedRun, *, on_gpu: bool) -> Iterator[MemoryUse]:
    """Yield the memory of the host that the processes of a run on one machine take, without that of `ring_uses`.

    Args:
        run: The run.
        on_gpu: The models are on GPUs.
    """
    spec, count = run.spec, run.world
    if not on_gpu:
        yield MemoryUse("the student's state", count * student_bytes(spec))
        for number, teacher in enumerate(spec.teacher):
            if teacher.loads_model:
                yield MemoryUse(f"{spec.teacher_name(number)}'s weights", count * teacher_bytes(teacher))
        if spec.rollout is not None and not spec.rollout.url:
            generating = spec.workers.nodes * spec.rollout.workers + 1  # and the weights that are published
            weights = weight_bytes(spec.student.model, spec.student.dtype)
            yield MemoryUse("the weights of rollout workers", generating * weights)
    yield MemoryUse("the copy for checkpoints", count * checkpoint_bytes(spec))


def ring_uses(run: ResolvedRun, *, on_gpu: bool) -> Iterator[MemoryUse]:
    """Yield the memory of the host that the teachers' signals take; arguments as of `host_uses`."""
    spec, transport = run.spec, run.spec.workers.transport
    # Without the bindings "auto" falls back to shared memory (`xtoken_core.transports.factory`).
    on_host = not on_gpu or transport in ("shared_memory", "queue") or (transport == "auto" and not has_bindings())
    for number in range(len(spec.teacher)):
        if on_host or spec.fills_on_host(number):
            shape = ring_shape(run, number)
            what = f"{spec.teacher_name(number)}'s signal in {shape.slots} slots"
            yield MemoryUse(what, run.world * shape.memory_bytes)


def has_bindings() -> bool:
    """Return whether the bindings of CUDA's runtime are installed, with which a ring can be on a GPU."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def check_host(run: ResolvedRun, machine: Machine) -> str:
    """Refuse a run on one machine that keeps more there than can be used.

    Args:
        run: The run.
        machine: The machine; what is not known of it is not checked.

    Returns:
        The estimate in one line.

    Raises:
        ConfigError: It keeps more; the text lists the parts, and names the settings.
    """
    spec = run.spec
    on_gpu = spec.workers.device == "cuda" or (bool(machine.gpu_bytes) and spec.workers.device != "cpu")
    rings = list(ring_uses(run, on_gpu=on_gpu))
    places = [("host memory (available)", [*host_uses(run, on_gpu=on_gpu), *rings], machine.memory_bytes)]
    if spec.workers.transport != "queue":
        places.append(("/dev/shm", rings, machine.shared_bytes))
    remedies = (
        f"lower train.micro_batch_tokens = {spec.train.micro_batch_tokens} or workers.slots = {spec.workers.slots}, "
        'send less (teacher.content = "hidden" or "topk"), or take smaller models or dtypes'
    )
    for where, uses, total in places:
        if total and (why := exceeds_memory(uses, total, where, remedies)):
            raise ConfigError(why)
    if on_gpu and machine.gpu_bytes:
        gpu = list(memory_uses(run, 0, max(1, count_gpus()), rings=not rings))
        places.insert(0, ("cuda:0", gpu, machine.gpu_bytes))
    kept = [f"{sum(use.nbytes for use in uses) / GIB:.2f} of {total / GIB:.2f} GiB in {w}" for w, uses, total in places]
    return f"memory: before any activation the run keeps {', '.join(kept)}"


def checkpoint_bytes(spec: RunSpec) -> int:
    """Return the bytes of a rank's part of a checkpoint, and of its copy in memory; adapters are not counted."""
    if spec.train.lora is not None:
        return 0
    whole = student_bytes(spec, copies=COPIES_BETWEEN_STEPS)
    masters = spec.train.master_weights and spec.student.dtype != "float32"
    return whole - weight_bytes(spec.student.model, spec.student.dtype) if masters and shards(spec) == 1 else whole


def _check_disk(run: ResolvedRun, output: Path) -> None:
    """Refuse a disk that has no room for a checkpoint.

    Raises:
        OutputError: It has none.
    """
    place = next(path for path in (output, *output.parents) if path.exists())
    needed = checkpoint_bytes(run.spec) * shards(run.spec)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OutputError(
            f"the disk of {output} has {free} bytes free, a checkpoint takes {needed}: free some, name an output on "
            'another disk, or keep less (train.optimizer = "adafactor", train.lora)'
        )
