"""The host's copy of a state: whole tensors and shares of sharded ones, as they were when the copy began."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from xtoken_services.trainer.staging import Stage

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeviceMesh]:
    """One rank that shares with nobody: its tensors are `DTensor`s all the same."""
    device = str(request.param)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).cpu().clone()


def test_a_copy_is_of_the_moment_it_was_begun(mesh: DeviceMesh) -> None:
    device = mesh.device_type
    state: dict[str, Tensor] = {
        "share": distribute_tensor(torch.randn(512, 256, device=device), mesh, [Shard(0)]),
        "whole": torch.randn(1 << 20, device=device),
        "count": torch.tensor(3.0, device=device),
    }
    stage = Stage()
    stage.prepare(state)
    for _ in range(3):
        expected = {name: local(value) for name, value in state.items()}
        stage.copy(state)
        stage.wait()
        for value in state.values():
            value.add_(1)
        staged = stage.staged()
        assert isinstance(staged["share"], DTensor)
        for name, value in expected.items():
            assert staged[name].device.type == "cpu"
            torch.testing.assert_close(local(staged[name]), value, rtol=0, atol=0)
