"""Check whether the processes of a run can be started from this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.files.allowed_paths import RefusedError
from xtoken_services.common.run.machine import count_gpus


def check_launch(spec: RunSpec) -> None:
    """Check that the processes of a run can be started from here at all.

    Raises:
        RefusedError: Ray or what a worker needs is not installed, a teacher is divided over more GPUs than there
            are, or this machine has too few GPUs for several node groups.
    """
    workers = spec.workers
    if workers.launcher == "ray" and not _installed("ray"):
        raise RefusedError("workers.launcher", "Ray is not installed: install it by pip install ray")
    if workers.launcher == "local":  # by this very interpreter; a cluster's nodes may have what is missing here
        for field, package in _needed(spec):
            if not _installed(package):
                raise RefusedError(field, f"needs {package}: install it by pip install {package}", joint=" ")
    gpus = count_gpus() if workers.launcher == "local" and workers.device != "cpu" else 0
    divided = next((number for number, teacher in enumerate(spec.teacher) if teacher.gpus > 1), None)
    if divided is not None and gpus and spec.gpus_needed > gpus:
        raise RefusedError(
            f"teacher.{divided}.gpus",
            f"the run takes {spec.gpus_needed} GPUs, this machine has {gpus}: lower teacher.gpus, teacher.gpu or "
            "workers.ranks",
        )
    if gpus and workers.nodes > 1 and gpus // workers.nodes < spec.gpus_needed:
        raise RefusedError(
            "workers.nodes",
            f"{workers.nodes} node groups on one machine take {workers.nodes * spec.gpus_needed} GPUs, and it has "
            f'{gpus}: lower workers.nodes or workers.ranks, or set workers.device = "cpu"',
        )


def _needed(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield the optional packages that workers import: the setting and the package."""
    for number, teacher in enumerate(spec.teacher):
        if teacher.quantized == "nf4" and (teacher.store is None or teacher.store_missing == "compute"):
            yield f"teacher.{number}.quantized", "bitsandbytes"
    if spec.train.lora is not None:
        yield "train.lora", "peft"
    if spec.report.tensorboard:
        yield "report.tensorboard", "tensorboard"
    if spec.report.wandb != "off":
        yield "report.wandb", "wandb"


def _installed(package: str) -> bool:
    """Return whether a package can be imported; a spec without an origin is a directory of the same name."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
