"""`embedding` beyond the common contract: memory, id types, and the order of its backward."""

import pytest
import torch

from xtoken_core.compat.embedding.reference import NativeEmbeddingOp
from xtoken_core.ops.registry import BACKENDS, load_backend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_copied_bit_for_bit(dtype, table):
    weight = torch.randn(9, 5).to(table)
    token_ids = torch.tensor([[0, 8, 3], [3, 3, 1]], dtype=dtype)
    op = NativeEmbeddingOp()
    assert torch.equal(op(token_ids, weight), weight[token_ids.long()])
    assert op.forward_fp32(token_ids, weight).dtype == torch.float32
    assert torch.equal(op.forward_fp32(token_ids, weight), weight[token_ids.long()].float())


def test_the_table_is_never_upcast():
    weight = torch.randn(4096, 64).bfloat16()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel() * out.element_size())
            return out

    with Watch():
        NativeEmbeddingOp().forward_fp32(torch.tensor([1, 2, 3]), weight)
    assert largest == 3 * 64 * 4


@pytest.mark.gpu
def test_peak_memory_on_the_device_is_that_of_the_rows():
    weight = torch.randn(50_000, 1024, device="cuda", dtype=torch.bfloat16)
    token_ids = torch.randint(50_000, (128,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    NativeEmbeddingOp().forward_fp32(token_ids, weight)
    assert torch.cuda.max_memory_allocated() - before < 4 * 128 * 1024 * 4


def long_runs(device):
    """Runs of one id that end before, at and after the pieces in which they are added."""
    generator = torch.Generator().manual_seed(0)
    lengths = {0: 1, 2: 63, 3: 64, 4: 65, 5: 128, 7: 200}
    ids = torch.cat([torch.full((n,), i) for i, n in lengths.items()])
    ids = ids[torch.randperm(len(ids), generator=generator)]
    return ids.to(device), torch.randn(len(ids), 40, generator=generator).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_triton_backward_adds_long_runs_in_float32_and_the_same_way_every_time(device, dtype):
    pytest.importorskip("triton")
    op = load_backend(BACKENDS["embedding"]["triton"])
    ids, upstream = long_runs(device)
    upstream = upstream.to(dtype)
    weight = torch.zeros(9, 40, dtype=dtype, device=device, requires_grad=True)
    runs = [torch.autograd.grad(op(ids, weight), weight, upstream)[0] for _ in range(2)]
    expected = torch.zeros(9, 40, dtype=torch.float64, device=device).index_add(0, ids, upstream.double())
    assert torch.equal(*runs)
    assert runs[0].dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3  # the interpreter cuts off instead of rounding
    assert (runs[0].double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert not runs[0][[1, 6, 8]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [1000, 16_384], ids=["few_ids", "many_ids"])
def test_pytorchs_backward_on_the_gpu_repeats_itself_in_this_version(count, dtype):
    """Not promised by PyTorch, which goes one way for few ids and another for many: seen here, said on the page."""
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(60, (count,), device="cuda", generator=generator) ** 2
    weight = torch.zeros(5000, 512, dtype=dtype, device="cuda", requires_grad=True)
    upstream = torch.randn(count, 512, device="cuda", generator=generator).to(dtype)
    runs = [torch.autograd.grad(NativeEmbeddingOp()(ids, weight), weight, upstream)[0] for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_the_triton_backward_of_no_ids_is_zero():
    pytest.importorskip("triton")
    op = load_backend(BACKENDS["embedding"]["triton"])
    weight = torch.ones(3, 4, requires_grad=True)
    rows = op(torch.empty(0, dtype=torch.long), weight)
    assert torch.equal(torch.autograd.grad(rows.sum(), weight)[0], torch.zeros(3, 4))
