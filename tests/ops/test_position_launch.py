"""Positions sorted by chunk: the kernel's result is that of sorting."""

import pytest
import torch

from xtoken_core.ops.chunks import chunk_positions

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = {"one_row": (1, 70, 9), "many_rows": (5, 33, 12), "one_position": (1, 1, 1), "no_positions": (2, 0, 3)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("B", "T", "P"), SHAPES.values(), ids=SHAPES)
def test_the_kernel_orders_positions_as_a_sort_does(device, dtype, B, T, P):
    from xtoken_core.ops.position_launch import positions_by_chunk

    chunk_id = torch.randint(-2, P + 2, (B, T), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for placed, expected in zip(positions_by_chunk(chunk_id, P), chunk_positions(chunk_id, P), strict=True):
        assert torch.equal(placed, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_batch_is_sorted(device, monkeypatch):
    from xtoken_core.ops import position_launch

    monkeypatch.setattr(position_launch, "MOST", 20)
    monkeypatch.setattr(position_launch, "chunk_positions_kernel", None)
    chunk_id = torch.arange(12, device=device).view(2, 6) // 2 - 1
    placed, expected = position_launch.positions_by_chunk(chunk_id, 6), chunk_positions(chunk_id, 6)
    assert all(torch.equal(*pair) for pair in zip(placed, expected, strict=True))
