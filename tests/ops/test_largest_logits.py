"""`largest_logits`: which tokens, in which order, and the sums beside them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.tolerances import OUTPUT, assert_within
from tests.support.device import without_waiting
from tests.support.examples import examples
from xtoken_core.ops.registry import BACKENDS, load_backend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_backend = pytest.mark.parametrize("short", ["reference", "triton"])
every_device = pytest.mark.parametrize("device", DEVICES)
SUMS = ("log_z", "log_z_scaled", "log_rest", "own")


def backend(short):
    if short == "triton":
        pytest.importorskip("triton")
    return load_backend(BACKENDS["largest_logits"][short])


def rows(*shape, dtype=torch.float32, seed=0):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def by_loops(logits, k):
    """Ids of each row, largest first; of equal ones the lowest."""
    flat = logits.flatten(0, 1).tolist()
    return [sorted(range(len(row)), key=lambda v, row=row: (-row[v], v))[:k] for row in flat]


def equals(op, logits, targets, *settings):
    """Compare with the reference on the same device: selection and non-finite sums exactly, sums within the table."""
    found, expected = op(logits, targets, *settings), backend("reference")(logits, targets, *settings)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values.nan_to_num(nan=1e30), expected.values.nan_to_num(nan=1e30))
    ours, theirs = (torch.stack([getattr(each, name) for name in SUMS]) for each in (found, expected))
    finite = theirs.isfinite()
    assert torch.equal(*(torch.where(finite, 0.0, x).nan_to_num(nan=1e30) for x in (ours, theirs)))
    # Together: the others are differences from a normaliser, and have its rounding.
    assert_within(ours[finite], theirs[finite], OUTPUT["row", torch.float32], "sums")


@every_backend
@examples(2, 6)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 40), levels=st.integers(1, 6))
def test_ties_go_to_the_lowest_id(short, seed, k, levels):
    logits = torch.randint(levels, (1, 2, 150), generator=torch.Generator().manual_seed(seed)) - levels / 2
    logits = logits.float()
    found = backend(short)(logits, torch.zeros(1, 2, dtype=torch.long), k, 150)
    assert found.ids.flatten(0, 1).tolist() == by_loops(logits, k)
    assert torch.equal(found.values, logits.gather(-1, found.ids))


@every_backend
@every_device
def test_hundreds_of_ties_at_the_border_in_bfloat16(short, device):
    logits = (20 + torch.randn(1, 2, 3000, generator=torch.Generator().manual_seed(1))).to(device, torch.bfloat16)
    found = backend(short)(logits, torch.zeros(1, 2, dtype=torch.long, device=device), 100, 3000)
    assert (logits == found.values[..., -1:]).sum(-1).min() > 30
    assert found.ids.flatten(0, 1).tolist() == by_loops(logits, 100)


@pytest.mark.parametrize("short", ["triton"])
@every_device
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float16))],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize(
    ("vocab", "head", "k", "T"),
    [
        pytest.param(300, 307, 7, 1.0, id="cut_head"),
        pytest.param(37, 37, 37, 2.0, id="one_group_all_tokens"),
        pytest.param(150, 150, 50, 1.0, id="fewer_groups_than_k"),
        pytest.param(4200, 4208, 17, 2.0, id="two_tiles"),
    ],
)
def test_the_reference_is_matched(short, device, dtype, vocab, head, k, T):
    logits = rows(1, 3, head, dtype=dtype).to(device)
    targets = torch.tensor([[0, vocab - 1, vocab + 5]], device=device)
    equals(backend(short), logits, targets, k, vocab, T)


@pytest.mark.parametrize("short", ["triton"])
@every_device
@pytest.mark.parametrize(
    "value", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow), -torch.inf], ids=["nan", "inf", "minus_inf"]
)
def test_what_is_not_finite_is_as_in_the_reference(short, device, value):
    logits = rows(1, 5, 200)
    logits[0, 0, 3] = value
    logits[0, 1, [3, 70, 71, 199]] = value
    logits[0, 2, 64:128] = value
    logits[0, 3] = value
    logits[0, 4, :198] = value  # fewer other tokens than are listed
    targets = torch.tensor([[3, 5, 70, 0, 199]], device=device)
    equals(backend(short), logits.to(device), targets, 3, 200, 1.0)


@every_backend
def test_float64_has_the_order_of_float32(short):
    logits, targets = rows(1, 2, 150).round(), torch.zeros(1, 2, dtype=torch.long)
    found, wide = (backend(short)(x, targets, 20, 140) for x in (logits, logits.double()))
    assert wide.values.dtype == torch.float64
    assert torch.equal(found.ids, wide.ids)


@every_backend
def test_zeros_of_either_sign_are_equal(short):
    logits = torch.full((1, 1, 70), -1.0)
    logits[..., [2, 66]], logits[..., [1, 65]] = 0.0, -0.0
    found = backend(short)(logits, torch.zeros(1, 1, dtype=torch.long), 3, 70)
    assert found.ids.tolist() == [[[1, 2, 65]]]


@every_backend
def test_a_rest_far_below_the_listed_tokens_keeps_its_digits(short):
    logits = torch.full((1, 1, 200), -300.0)
    logits[..., 10] = 0.0
    found = backend(short)(logits, torch.zeros(1, 1, dtype=torch.long), 1, 200)
    torch.testing.assert_close(found.log_rest, torch.full((1, 1), -300.0) + torch.tensor(199.0).log())


@pytest.mark.parametrize("short", ["triton"])
@every_device
def test_positions_of_strided_samples_are_read_where_they_are(short, device):
    wide = rows(3, 4, 90).to(device)
    equals(backend(short), wide[::2, 1:3], torch.ones(2, 2, dtype=torch.long, device=device), 4, 80, 1.0)
    swapped = wide.transpose(1, 2).contiguous().transpose(1, 2)
    equals(backend(short), swapped, torch.ones(3, 4, dtype=torch.long, device=device), 4, 80, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("short", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [262_144, 151_669, 50_257])
@pytest.mark.parametrize("k", [16, 64, 256, 512])
def test_rows_of_real_vocabularies(short, dtype, vocab, k):
    logits = rows(2, 33, -(-vocab // 64) * 64, dtype=dtype, seed=k)
    logits[0, 0] = 1.0
    logits[0, 1, : 64 * k] += 8.0  # whole groups of large logits
    targets = torch.arange(66).view(2, 33) * 997 % vocab
    for T in (1.0, 2.0):
        equals(backend(short), logits.cuda(), targets.cuda(), k, vocab, T)


@pytest.mark.gpu
@pytest.mark.parametrize("short", ["triton"])
def test_a_call_does_not_wait_for_the_device(short):
    logits, targets = rows(1, 9, 5000).cuda(), torch.zeros(1, 9, dtype=torch.long, device="cuda")
    backend(short)(logits, targets, 20, 5000, 2.0)
    with without_waiting():
        backend(short)(logits, targets, 20, 5000, 2.0)
