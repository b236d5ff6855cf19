"""Hidden states from process to process, by the queue and by Ray's direct transport: `python -m benchmarks.ray_direct`.

One process sends `[8192, 1536]` in bfloat16 from its GPU to another's, or on the CPU where there are not two GPUs. Ray
binds wildcard addresses whatever it is told: run it where nothing else can reach it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import command_line, machine, write_result
from benchmarks.queue.ours import PARTITION, TASK, connect, server
from benchmarks.queue.workload import PATIENCE_S
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.buffers import column_values
from xtoken_core.wire import Column
from xtoken_core.wire.columns import offsets_from_lengths
from xtoken_services.supervisor.launchers.local import LOOPBACK, free_port

TOKENS, WIDTH, COUNT = 8192, 1536, 60
WARMUP, QUEUED, SETTLE_S = 5, 40, 3.0
WAYS = {"object_store": (None, None), "gloo": ("gloo", "torch_gloo"), "nccl": ("nccl", "nccl"), "nixl": ("nixl", None)}
"""Ray's names of each transport and of its group's backend, if it needs a group."""


def main() -> int:
    """Measure every way, write JSON after each."""
    parser = command_line(__doc__, "ray_direct")
    parser.add_argument("--small", action="store_true", help="few and small tensors on the CPU, to try the harness")
    arguments = parser.parse_args()
    if find_spec("ray") is None:
        sys.exit("benchmarks.ray_direct: Ray is not installed: install it by pip install ray")
    import ray

    gpu = torch.cuda.device_count() > 1 and not arguments.small
    tokens, count = (512, 10) if arguments.small else (TOKENS, COUNT)
    ways = {"queue": attempt(by_queue, gpu, tokens, count)}
    report = {**machine(), "ray": ray.__version__, "tokens": tokens, "width": WIDTH, "count": count, "ways": ways}
    ray.init(num_cpus=4, num_gpus=2 if gpu else 0, include_dashboard=False, log_to_driver=False)
    for name, (_, backend) in WAYS.items():
        if gpu or name != "nccl":
            ways[name] = attempt(by_ray, name, gpu, tokens, count)
            for when in ("killed_at_rest", "killed_sending") if backend else ():
                ways[name][when] = attempt(by_ray, name, gpu, tokens, count, when)
        write_result(arguments.out, report)
    return 0


def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return a call's result, or the last line of its error."""
    try:
        return work(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"}


def rates(pids: dict[str, int], work: Callable[[], Any], nbytes: int) -> dict[str, Any]:
    """Return GB per second of `work`, which moves `nbytes`, and by process the processor seconds per GB."""
    processes = [psutil.Process(pid) for pid in pids.values()]
    before, began = [sum(each.cpu_times()[:2]) for each in processes], time.perf_counter()
    work()
    spent, after = time.perf_counter() - began, [sum(each.cpu_times()[:2]) for each in processes]
    per_gb = [(end - start) / nbytes * 1e9 for start, end in zip(before, after, strict=True)]
    return {"gb_per_s": nbytes / spent / 1e9, "cpu_s_per_gb": dict(zip(pids, per_gb, strict=True))}


def by_queue(gpu: bool, tokens: int, count: int) -> dict[str, Any]:
    """Measure this process, which sends, and a receiver, with a queue between them, over TCP."""
    torch.set_num_threads(1)  # as Ray does in its processes: threads that wait for the next copy spin
    tensor = torch.randn(tokens, WIDTH, device="cuda:1" if gpu else "cpu").bfloat16()
    host = torch.empty_like(tensor, device="cpu", pin_memory=gpu)
    values = memoryview(host.view(torch.uint8).numpy()).cast("B")
    columns = {"input_ids": Column("jagged", "bfloat16", 1, (WIDTH,), values, offsets_from_lengths([tokens]))}
    context = get_context("spawn")
    barrier = context.Barrier(2, timeout=PATIENCE_S)
    with tempfile.TemporaryDirectory() as directory:
        address = Address(f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}", token_file=Path(directory, "token"))
        with server(address) as queue, connect(address, "sender") as client:

            def send() -> None:
                for number in range(count):
                    host.copy_(tensor)
                    client.put(PARTITION, [number], columns, wait_s=PATIENCE_S)
                barrier.wait()

            process = context.Process(target=receive, args=(address, gpu, count, barrier), daemon=True)
            process.start()
            barrier.wait()
            pids = {"sender": os.getpid(), "receiver": process.pid or 0, "server": queue.pid}
            found = rates(pids, send, count * host.nbytes)
            barrier.wait()
    return found


def receive(address: Address, gpu: bool, count: int, barrier: Any) -> None:
    """Claim tensors and copy them to the device."""
    torch.set_num_threads(1)
    client = connect(address, "receiver")
    torch.empty(0, device="cuda:0" if gpu else "cpu")  # CUDA starts before the time does
    barrier.wait()
    for _ in range(count):
        claimed = client.claim(PARTITION, TASK, count=1, fields=["input_ids"], wait_s=PATIENCE_S)
        assert claimed is not None
        column_values(claimed[1]["input_ids"]).to("cuda:0" if gpu else "cpu", copy=True)
        client.ack(PARTITION, TASK, claimed[0].ids)
    barrier.wait()
    barrier.wait()  # the times have been read


class Holder:
    """Sends or receives tensors, in a process of Ray's."""

    def __init__(self, gpu: bool, tokens: int, transport: str | None) -> None:
        self.tensor = torch.randn(tokens, WIDTH, device="cuda:0" if gpu else "cpu").bfloat16()
        self.target = "cpu" if transport in (None, "gloo") else self.tensor.device

    def pid(self) -> int:
        """Return the process's id."""
        return os.getpid()

    def make(self) -> torch.Tensor:
        """Return a new tensor, on the host if the way needs it there."""
        return self.tensor.to(self.target, copy=True)

    def take(self, received: torch.Tensor) -> float:
        """Copy a tensor to the device; return its last item, which waits for the copy."""
        return float(self.tensor.copy_(received)[-1, -1])


def by_ray(name: str, gpu: bool, tokens: int, count: int, killed: str = "") -> dict[str, Any]:
    """Measure a sender and a receiver of Ray's, or kill the sender.

    Args:
        name: The way.
        gpu: Whether each has a GPU.
        tokens: Rows of a tensor.
        count: Number of tensors.
        killed: When the sender is killed: at rest or while it sends. Then the result says whether the receiver is still
            there, and whether it receives from another sender.
    """
    import ray.experimental.collective

    transport, backend = WAYS[name]
    kind = ray.remote(num_gpus=int(gpu), enable_tensor_transport=True)(Holder)
    holders = [receiver := kind.remote(gpu, tokens, transport)]

    def wait(what: Any) -> Any:
        return ray.get(what, timeout=PATIENCE_S / 4)

    def send(number: int) -> list[Any]:
        make = holders[-1].make.options(tensor_transport=transport)
        return [receiver.take.remote(make.remote()) for _ in range(number)]

    def ready() -> dict[str, int]:
        holders.append(kind.remote(gpu, tokens, transport))
        pids = wait([each.pid.remote() for each in (holders[-1], receiver)])
        if backend:
            ray.experimental.collective.destroy_all_collective_groups()
            ray.experimental.collective.create_collective_group([holders[-1], receiver], backend=backend)
        wait(send(WARMUP))
        return dict(zip(("sender", "receiver", "driver"), (*pids, os.getpid()), strict=True))

    try:
        pids = ready()
        if not killed:
            return rates(pids, lambda: wait(send(count)), count * tokens * WIDTH * 2)
        wait(send(QUEUED if killed == "killed_sending" else 0)[:WARMUP])
        psutil.Process(pids["sender"]).kill()
        time.sleep(SETTLE_S)
        there = attempt(lambda: wait(receiver.pid.remote()) == pids["receiver"])
        return {"receiver": there, "another_sender": attempt(lambda: bool(ready()))}
    finally:
        for holder in holders:
            ray.kill(holder)


if __name__ == "__main__":
    sys.exit(main())
