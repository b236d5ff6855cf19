"""The memory of a run on one machine, place by place: every GPU, the host, shared memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.memory_estimate import SHARED, MemoryUse, Where, all_uses, has_bindings


@dataclass(frozen=True)
class Place:
    """Memory of one kind, and all that a run takes of it.

    Attributes:
        name: Its name.
        uses: The parts.
        total: What there is; 0 if that is not known.
    """

    name: str
    uses: list[MemoryUse]
    total: int

    @property
    def needed(self) -> int:
        """Bytes of all parts."""
        return sum(use.nbytes for use in self.uses)


def places_of(run: ResolvedRun, machine: Machine) -> list[Place]:
    """Return the memory that a run on one machine takes: of every GPU, the host, and shared memory."""
    spec, transport = run.spec, run.spec.workers.transport
    on_gpu = spec.workers.device == "cuda" or (bool(machine.gpu_bytes) and spec.workers.device != "cpu")
    # Without the bindings "auto" falls back to shared memory (`xtoken_core.transports.factory`).
    rings = on_gpu and transport not in ("shared_memory", "queue") and (transport != "auto" or has_bindings())
    gpus, nodes = max(1, machine.gpus), spec.workers.nodes if spec.workers.launcher == "local" else 1
    part = max(1, gpus // nodes)  # what a node group sees of the machine's GPUs
    of_one = [*all_uses(run, rings=rings, on_gpu=on_gpu)]
    uses = [replace(use, gpu=node * part + use.gpu % part) for node in range(nodes) for use in of_one]
    host = [use for use in uses if use.where != Where.DEVICE or not on_gpu]
    shared = [use for use in uses if use.where == Where.SHARED]
    places = [Place("host memory (available)", host, machine.memory_bytes)]
    if transport != "queue":
        places.append(Place(SHARED, shared, machine.shared_bytes))
    devices = [use for use in uses if use.where == Where.DEVICE] if on_gpu else []
    used = sorted({use.gpu % gpus for use in devices})
    on_each = [[use for use in devices if use.gpu % gpus == gpu] for gpu in used]
    return [Place(f"cuda:{gpu}", own, machine.gpu_bytes) for gpu, own in zip(used, on_each, strict=True)] + places
