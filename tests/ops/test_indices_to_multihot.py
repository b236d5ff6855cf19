"""`indices_to_multihot` beyond the common contract: the documented example, duplicates, empty slots, odd sizes."""

import pytest
import torch

from xtoken_core.compat.indices_to_multihot import fused_indices_to_multihot, indices_to_multihot, null_decorator

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
both = pytest.mark.parametrize("convert", [indices_to_multihot, fused_indices_to_multihot], ids=["reference", "triton"])


@both
def test_the_documented_example(convert):
    multihot, probs = convert(torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]]), 4)
    assert multihot.tolist() == [[True, True, False, False], [False, True, True, False]]
    torch.testing.assert_close(probs, torch.tensor([[0.1, 0.2, 0.0, 0.0], [0.0, 0.3, 0.4, 0.0]]))


@both
def test_the_highest_slot_of_a_duplicate_wins_and_the_others_get_no_gradient(convert):
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    multihot, spread = convert(torch.tensor([[2, 0, 2, 2]]), probs, 3)
    assert multihot.tolist() == [[True, False, True]]
    torch.testing.assert_close(spread, torch.tensor([[0.2, 0.0, 0.4]]))
    (gradient,) = torch.autograd.grad(spread, probs, torch.tensor([[5.0, 6.0, 7.0]]))
    assert gradient.tolist() == [[0.0, 5.0, 0.0, 7.0]]


@both
def test_entries_that_name_no_expert_are_ignored(convert):
    probs = torch.ones(2, 2, requires_grad=True)
    multihot, spread = convert(torch.tensor([[-1, 3], [9, 1]]), probs, 3)
    assert multihot.tolist() == [[False] * 3, [False, True, False]]
    (gradient,) = torch.autograd.grad(spread.sum(), probs)
    assert gradient.tolist() == [[0.0, 0.0], [0.0, 1.0]]


@both
def test_no_tokens(convert):
    multihot, spread = convert(torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2), 5)
    assert multihot.shape == spread.shape == (0, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("indices_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 1, 1), (37, 8, 128), (70, 3, 5), (5, 6, 300)])
def test_the_kernels_equal_the_reference_bit_for_bit(tokens, topk, experts, indices_dtype, probs_dtype, device):
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(-1, experts + 1, (tokens, topk), generator=generator).to(device, indices_dtype)
    probs = torch.rand(tokens, topk, generator=generator).to(device, probs_dtype).requires_grad_()
    upstream = torch.randn(tokens, experts, generator=generator).to(device, probs_dtype)
    results = [convert(indices, probs, experts) for convert in (fused_indices_to_multihot, indices_to_multihot)]
    for mine, expected in zip(*results, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)
    gradients = [torch.autograd.grad(spread, probs, upstream)[0] for _, spread in results]
    assert torch.equal(*gradients)


def test_the_null_decorator_changes_nothing():
    def function():
        return 1

    assert null_decorator(function) is function
    assert null_decorator(number=3)(function) is function
    assert null_decorator()(function) is function
