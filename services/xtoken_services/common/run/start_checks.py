"""The checks of a run before its start, which a dry run makes too: files, memory, disk. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from pathlib import Path

from xtoken_core.config.loss import ADAPTIVE, LEAST_BYTES
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, OutputError
from xtoken_services.common.models.weights import weight_count
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.memory_estimate import (
    GIB,
    SHARED,
    Where,
    checkpoint_bytes,
    exceeds_memory,
    shards,
    weight_bytes,
)
from xtoken_services.common.run.memory_places import Place, places_of
from xtoken_services.common.run.resolve import Progress, file_warnings, resolve_run
from xtoken_services.common.text.training_text import documents_of, open_held_out

MOST_ABOVE = 1.5
"""Times the memory of a machine from which on an estimate, which is at most 20% above the peak, refuses a run."""


def check_start(
    spec: RunSpec, progress: Progress | None = None, *, output: Path | None = None
) -> tuple[ResolvedRun, list[str]]:
    """Resolve a run, and refuse it if this machine cannot hold it.

    Args:
        spec: The run.
        progress: As of `resolve_run`.
        output: Where its checkpoints will be, if not in the specification's output.

    Returns:
        The run with what its files say; and lines to show before its start: sizes, see `is_size`, and warnings.

    Raises:
        XtokenError: It is refused.
    """
    resolved = resolve_run(spec, progress)
    memory = check_host(resolved, Machine.of_this()) if spec.workers.launcher == "local" else []
    disk = _check_disk(resolved, output or spec.output)
    warnings = [*file_warnings(resolved), *weight_warnings(resolved.spec)]
    return resolved, [*_size_lines(resolved), *_forms(resolved.spec), *memory, disk, *warnings]


def _forms(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each file of the text whose records were recognised as a form of conversations."""
    for location, form in (found for text in documents_of(spec) for found in text.conversations()):
        if form:
            yield f"text: {location} is a record of {form}, and is read as messages, as is every other such record"


def weight_warnings(spec: RunSpec) -> Iterator[str]:
    """Yield a warning if an evaluation reads too little for an adaptive weight."""
    if spec.eval is None or spec.loss.kl_loss_weight_end != ADAPTIVE or not spec.loss.weighs_kd:
        return
    most, sizes = spec.eval.max_bytes, accumulate(len(text.encode()) for text in open_held_out(spec).documents())
    first = next(sizes, 0)  # which is always read
    if (read := max(takewhile(lambda size: size <= most, sizes), default=first)) < LEAST_BYTES:
        yield (
            f"the weight of the divergence stays {spec.loss.kl_loss_weight:g}, however good the student becomes, which "
            f"is no error: {read:,} bytes of held-out text are read, fewer than {LEAST_BYTES:,}; a weight that falls "
            f"takes more text in eval.path, or where that has more, a larger eval.max_bytes than {most}"
        )


def _size_lines(run: ResolvedRun) -> list[str]:
    """Return the sizes of text and models in two lines."""
    spec, epochs = run.spec, run.spec.data.epochs
    texts = f"{run.records:,} {'pieces' if run.piece_bytes else 'records'}, {epochs} epoch{'s' * (epochs > 1)}"
    steps = f"{run.positions:,} samples in {run.steps:,} steps of {spec.train.samples_per_step}"
    tokens = f"at most {run.positions * spec.student.context_length:,} tokens"
    if spec.eval is not None:
        often = f"evaluated {spec.eval.evaluations(run.steps)} times, every {spec.eval.every} steps"
        tokens += f"; {often}, on at most {spec.eval.max_bytes:,} bytes"
    loaded = [(spec.teacher_name(n), teacher) for n, teacher in enumerate(spec.teacher) if teacher.loads_model]
    models = [("student", spec.student), *loaded]
    counts = [f"{what} {weight_count(model.model) / 1e6:,.1f} million parameters" for what, model in models]
    return [f"text: {texts}: {steps}, {tokens}", f"models: {', '.join(counts)}"]


def check_host(run: ResolvedRun, machine: Machine) -> list[str]:
    """Refuse a run on one machine that keeps more there than can be used, or is estimated to need far more.

    What is kept on GPUs is checked by the processes that use them.

    Args:
        run: The run.
        machine: The machine; what is not known of it is not checked.

    Returns:
        The estimate of its memory, a line for each process and one for all, and a warning if it is above what there is.

    Raises:
        ConfigError: It does; the text lists the parts, and names the settings.
    """
    spec, places = run.spec, places_of(run, machine)
    remedies = (
        f"lower train.micro_batch_tokens = {spec.train.micro_batch_tokens} or workers.slots = {spec.workers.slots}, "
        + 'send less (teacher.content = "hidden" or "topk"), '
        * any(spec.content_of(n) == "logits" for n in range(len(spec.teacher)))
        + "or take smaller models or dtypes"
    )
    if spec.rollout is not None and spec.rollout.weights != "directory":
        remedies += '; of /dev/shm, set rollout.weights = "directory" or enlarge it (in a container --shm-size)'
    for place in places:
        on_host = not place.name.startswith("cuda")
        if on_host and place.total and (why := exceeds_memory(place.uses, place.total, place.name, remedies)):
            raise ConfigError(why)
        if 0 < place.total * MOST_ABOVE < place.needed:
            largest = sorted(place.uses, key=lambda use: -use.nbytes)[:3]
            parts = ", ".join(f"{use.process}: {use.what} {gib(use.nbytes)}" for use in largest)
            has = f"{gib(place.total)} of {place.name}"
            raise ConfigError(f"the run needs about {gib(place.needed)} where there is {has} ({parts}, …): {remedies}")
    short = [place.name for place in places if 0 < place.total < place.needed]
    above = f"the run may need more memory than there is in {' and '.join(short)}: {remedies}"
    return [*memory_lines(places), *([above] if short else [])]


def memory_lines(places: Sequence[Place]) -> list[str]:
    """Return an estimate of memory in lines: processes that take the same in one, and what all of them take."""
    taken: dict[str, dict[str, int]] = {}
    for place in places:
        for use in place.uses:
            if place.name == SHARED or use.where != Where.SHARED:
                of = taken.setdefault(use.process, {})
                of[place.name] = of.get(place.name, 0) + use.nbytes
    alike: dict[str, list[str]] = {}
    for process, sizes in taken.items():
        text = ", ".join(f"{gib(size)} {name.partition(' (')[0]}" for name, size in sizes.items() if size)
        alike.setdefault(text, []).append(process)
    lines = [f"memory of {', '.join(names)}: {text}{' each' * (len(names) > 1)}" for text, names in alike.items()]
    whole = ", ".join(f"{gib(place.needed)} of {gib(place.total)} {place.name}" for place in places if place.needed)
    return [*lines, f"memory of the run: about {whole}"]


def gib(nbytes: float) -> str:
    """Format a size in GiB.

    >>> gib(3 << 29)
    '1.50 GiB'
    """
    return f"{nbytes / GIB:.2f} GiB"


def _check_disk(run: ResolvedRun, output: Path) -> str:
    """Refuse a disk that has no room for a checkpoint.

    Returns:
        What checkpoints and the exported model take, in a line; a warning if that is more than there is.

    Raises:
        OutputError: It has none.
    """
    spec = run.spec
    place = next(path for path in (output, *output.parents) if path.exists())
    needed = checkpoint_bytes(spec) * shards(spec)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OutputError(
            f"the disk of {output} has {free} bytes free, a checkpoint takes {needed}: free some, name an output on "
            'another disk, or keep less (train.optimizer = "adafactor", train.lora)'
        )
    kept = spec.train.keep_checkpoints + (1 if spec.eval is not None and spec.eval.keep_best else 0)
    model = weight_bytes(spec.student.model, spec.student.dtype)
    whole = kept * needed + model
    line = (
        f"at most {kept} checkpoints of {gib(needed)}, and the model of {gib(model)}: {gib(whole)} of {gib(free)} free"
    )
    low = f"the disk of {output} may fill up: free some, or lower train.keep_checkpoints ({line})"
    return f"disk: {line}" if whole <= free else low
