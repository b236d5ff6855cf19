"""`select_topk_columns`: which columns, and which of equal ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtoken_core.ops.registry import BACKENDS, load_backend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHORT = ["reference", "triton"]
every_backend = pytest.mark.parametrize("short", SHORT)


def backend(short):
    if short == "triton":
        pytest.importorskip("triton")
    return load_backend(BACKENDS["select_topk_columns"][short])


def by_loops(logits, k):
    rows = logits.reshape(-1, logits.shape[-1]).tolist()
    maxima = [max(row[v] for row in rows) for v in range(logits.shape[-1])]
    return sorted(sorted(range(len(maxima)), key=lambda v: (-maxima[v], v))[:k])


@every_backend
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 40), levels=st.integers(1, 6))
def test_ties_go_to_the_lowest_id(short, seed, k, levels):
    logits = torch.randint(levels, (2, 3, 33), generator=torch.Generator().manual_seed(seed)) - levels / 2
    assert backend(short)(logits.float(), k).tolist() == by_loops(logits.float(), k)


@every_backend
@pytest.mark.parametrize("device", DEVICES)
def test_hundreds_of_ties_at_the_border_in_bfloat16(short, device):
    logits = 20 + torch.randn(2, 4, 3000, generator=torch.Generator().manual_seed(1))
    logits = logits.to(device, torch.bfloat16)
    maxima = logits.amax(dim=(0, 1)).tolist()
    k = 700
    border = sorted(maxima, reverse=True)[k - 1]
    assert sum(value == border for value in maxima) > 100
    assert backend(short)(logits, k).tolist() == by_loops(logits, k)


@every_backend
def test_zeros_of_either_sign_are_equal_and_infinities_are_ordered(short):
    row = torch.tensor([[[-0.0, 0.0, -torch.inf, torch.inf, -1.0]]])
    assert backend(short)(row, 2).tolist() == [0, 3]
    assert backend(short)(row, 4).tolist() == [0, 1, 3, 4]


@every_backend
def test_a_view_of_a_wider_head_is_read_where_it_is(short):
    wide = torch.randn(2, 3, 50)
    wide[..., 40:] = 100.0
    assert backend(short)(wide[..., :40], 5).tolist() == by_loops(wide[..., :40], 5)


@every_backend
def test_all_columns_if_k_is_as_large(short):
    assert backend(short)(torch.randn(1, 2, 7), 7).tolist() == list(range(7))
    assert backend(short)(torch.randn(1, 2, 7), 9).tolist() == list(range(7))
