"""Classes in columns: where their tokens lie, and the kernel's terms and ratios beside sums in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from xtoken_core.chain import class_columns

pytest.importorskip("triton")
launch = pytest.importorskip("xtoken_core.ops.chain.class_columns_launch")
layout = pytest.importorskip("xtoken_core.ops.chain.layout")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 2), (3, 1), (2, 4), (5, 3), (1, 7), (40, 3), (2, 1)]
"""Tokens of classes on both sides; one class is plain."""
STARTS = 5


def roots(sizes, seed=0):
    """A class for each token of both sides, in random order, with tokens of no class."""
    rng = np.random.default_rng(seed)
    own = [np.concatenate([np.repeat(np.arange(len(sizes)), sizes[:, k]), [len(sizes)] * 3]) for k in (0, 1)]
    return [rng.permutation(root) for root in own]


@pytest.fixture(params=[True, False], ids=["shapes", "loops"])
def small(request, monkeypatch):
    for name, value in {"WIDTHS": {1: 2, 2: 6}, "LANES": 32, "TASK_ROWS": 8}.items():
        monkeypatch.setattr(class_columns, name, value)
    if not request.param:
        monkeypatch.setattr(class_columns, "SHAPES", ())


def widths_of(found):
    """The lanes of a class of each block."""
    widths = np.zeros(len(found.table), np.int64)
    for width, _, _, first, last in found.launches:
        widths[found.blocks[first, 0] : found.blocks[last - 1, 1]] = width
    return widths


def test_every_member_is_in_a_lane_of_its_class():
    sizes = np.random.default_rng(1).geometric(0.3, (3000, 2)) ** np.array([1, 2])
    own = roots(sizes)
    found = class_columns.column_layout(*own, len(sizes))
    assert (found.number[:-1][~(sizes == 1).all(1)] >= 0).all()
    widths = widths_of(found)
    for k, root in enumerate(own):
        members = found.members[k]
        assert np.array_equal(np.sort(members[members >= 0]), np.flatnonzero(found.number[root] >= 0))
        for (first, _, *starts), width in zip(found.table, widths, strict=True):
            begin, rows = starts[k], starts[2 + k]
            block = members[begin : begin + rows * class_columns.LANES].reshape(rows, class_columns.LANES)
            of_lane = first + np.arange(class_columns.LANES) // width
            assert ((block < 0) | (found.number[root[block]] == of_lane)).all()


def test_blocks_of_a_launch_have_its_rows():
    sizes = np.random.default_rng(1).geometric(0.3, (3000, 2))
    found = class_columns.column_layout(*roots(sizes), len(sizes))
    fixed = 0
    for _, student, teacher, first, last in found.launches:
        rows = found.table[found.blocks[first, 0] : found.blocks[last - 1, 1], 4:]
        if student:
            fixed += 1
            assert (rows == (student, teacher)).all()
    assert fixed == len(class_columns.SHAPES)
    assert np.array_equal(found.blocks[1:, 0], found.blocks[:-1, 1])
    assert found.blocks[-1, 1] == len(found.table)


def packed(alive):
    bits = np.packbits(alive, axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int32))


def expected(z, live, own, number, chunk):
    """Terms `[3, E]` and ratios `[E, M]` in float64."""
    sums = []
    for k in (0, 1):
        p = np.where(live[k], np.exp(z[k]), 0.0)
        p = p / p.sum(1, keepdims=True)
        sums.append([p[:, number[own[k]] == m].sum(1) for m in range(number.max() + 1)])
    alive = np.stack([live[0][:, number[own[0]] == m].any(1) for m in range(number.max() + 1)])
    q, p = (np.array(each) for each in sums)
    p = np.where(alive, p, 0.0)
    with np.errstate(all="ignore"):
        kl = np.where(p > 0, p * (np.log(p) - np.log(np.maximum(q, 1.1754943508222875e-38))), 0.0)
        ratio = np.where(q > 0, p / q, 0.0)
    known = chunk >= 0
    terms = np.stack([kl.sum(0), p.sum(0), np.where(q > 0, p, 0.0).sum(0)])
    return terms[:, known], ratio.T[known], known


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
def test_terms_and_ratios(device):
    rng = np.random.default_rng(2)
    sizes = np.array(SIZES)
    own = roots(sizes)
    found = class_columns.column_layout(*own, len(sizes))
    z = [3 * rng.standard_normal((STARTS, len(root))).astype(np.float32) for root in own]
    live = [rng.random(x.shape) < 0.7 for x in z]
    live[0][0, found.number[own[0]] == 1] = False  # a class that no live token of the student is in
    z[0][1, found.number[own[0]] == 2] = -np.inf  # and one without probability
    chunk = np.array([0, 1, -1, 2, 3])
    bits = [
        packed(np.where(m >= 0, each[:, np.maximum(m, 0)], False)) for each, m in zip(live, found.members, strict=True)
    ]
    lse = [np.log(np.where(each, np.exp(x), 0.0).sum(1)).astype(np.float32) for each, x in zip(live, z, strict=True)]
    of = torch.as_tensor
    members = [layout.as_int32(np.maximum(m, 0), device) for m in found.members]
    plan = SimpleNamespace(
        columns=SimpleNamespace(table=layout.as_int32(found.table, device), launches=found.launches),
        blocks=layout.as_int32(found.blocks, device), aligned=False,
        student=SimpleNamespace(members=members[0]), teacher=SimpleNamespace(members=members[1]),
    )  # fmt: skip
    rows = rng.permutation(STARTS), rng.permutation(STARTS)
    logits = [torch.empty(1, *x.shape) for x in z]
    for k in (0, 1):
        logits[k][0, rows[k]] = of(z[k])
    starts = SimpleNamespace(
        chunk=of(chunk, device=device), student_row=of(rows[0], device=device), teacher_row=of(rows[1], device=device)
    )
    ratio = torch.full((STARTS, found.number.max() + 1), np.nan, device=device)
    terms = torch.full((1 + len(found.blocks), 3, STARTS), np.nan, device=device)
    launch.compare_columns(
        plan, starts, tuple(x.to(device) for x in logits), tuple(x.to(device) for x in bits), ratio,
        tuple(of(x, device=device) for x in lse), terms, 1.0,
    )  # fmt: skip
    wanted, of_ratio, known = expected(z, live, own, found.number, chunk)
    torch.testing.assert_close(terms[1:].sum(0).cpu()[:, known], of(wanted).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ratio.cpu()[known], of(of_ratio).float(), rtol=1e-4, atol=1e-6)
