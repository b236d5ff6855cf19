"""The ranks of a trainer: what they must agree on. One rank needs no process group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from xtoken_core.errors import ConfigError

TIMEOUT = timedelta(minutes=10)


class Group:
    """All ranks of one trainer.

    Args:
        rank: This process's rank.
        size: Number of ranks. With more than one, `MASTER_ADDR` and `MASTER_PORT` say where they meet.
        device: NCCL is used on a GPU, gloo elsewhere.

    Raises:
        ConfigError: The meeting place is not given.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        if size == 1:
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"a trainer of {size} ranks needs {' and '.join(missing)} in the environment")
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which rewinds, acknowledges, saves and reports."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item() > 0)

    def from_leader(self, value: int) -> int:
        """Rank 0's value."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())

    def gather(self, mine: list[dict[str, Tensor]]) -> list[list[dict[str, Tensor]]]:
        """Every rank's metrics, as JSON in padded byte tensors: ranks may differ in how many they have."""
        if self.size == 1:
            return [mine]
        plain = json.dumps([{name: float(value) for name, value in part.items()} for part in mine]).encode()
        sizes = self._all(torch.tensor([len(plain)], dtype=torch.int64, device=self.device))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=self.device)
        padded[: len(plain)] = torch.frombuffer(bytearray(plain), dtype=torch.uint8).to(self.device)
        texts = [bytes(part[: int(size)].cpu().tolist()) for part, size in zip(self._all(padded), sizes, strict=True)]
        return [[{k: torch.tensor(v) for k, v in part.items()} for part in json.loads(text)] for text in texts]

    def _all(self, mine: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine)
        return gathered

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over ranks: their denominators are the step's own, so there is nothing to average."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
