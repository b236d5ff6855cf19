"""Kernels whose rows and column sets do not fit one block, and at a size that does not fit one program."""

import importlib

import pytest
import torch

from tests.ops.op_cases import CASES, gradient, outputs
from tests.ops.tolerances import FAMILY, GRADIENT, OUTPUT, assert_within
from xtoken_core.ops.gold.reference import GoldOptions, TokenPartition
from xtoken_core.ops.p_kl.reference import PKLOptions
from xtoken_core.ops.registry import BACKENDS, load_backend
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check(name, inputs, differentiable, dtype=torch.float32):
    op, truth = (load_backend(BACKENDS[name][short]) for short in ("triton", "reference"))
    key = FAMILY[name], dtype
    for actual, expected in zip(outputs(op, inputs), outputs(truth, inputs, fp32=True), strict=True):
        assert_within(actual, expected, OUTPUT[key], "output")
    assert_within(
        gradient(op, inputs, differentiable), gradient(truth, inputs, differentiable), GRADIENT[key], "gradient"
    )


def shrink(monkeypatch, name, *, where="triton", folder="xtoken_core.ops", **sizes):
    module = importlib.import_module(f"{folder}.{name}.{where}")
    for constant, size in sizes.items():
        monkeypatch.setattr(module, constant, size)


@pytest.mark.parametrize("device", DEVICES)
def test_cross_entropy(monkeypatch, device):
    shrink(monkeypatch, "cross_entropy", BLOCK=16)
    check("cross_entropy", CASES["cross_entropy"][""].make(torch.float32, torch.device(device)), "logits")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["", "reverse_T2"])
def test_token_kl(monkeypatch, variant, device):
    shrink(monkeypatch, "token_kl", BLOCK=16, GRADIENT_BLOCK=32)
    check("token_kl", CASES["token_kl"][variant].make(torch.float32, torch.device(device)), "student_logits")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", [pytest.param("", id="forward"), pytest.param("prob", marks=pytest.mark.slow)])
def test_p_kl(monkeypatch, device, variant):
    tiles = {f"{name}_TILE": (16, 4) for name in ("PROJECT", "CHUNK")}
    logits = {f"{name}_TILE": (16, 8) for name in ("STUDENT", "TEACHER", "GRADIENT")}
    shrink(
        monkeypatch,
        "p_kl",
        where="launch",
        **tiles,
        **logits,
        PER=(4, 4),
        PARTS=2,
        PADDING=16,
        SLAB=16,
        PROJECT_AHEAD=1,
    )
    check("p_kl", CASES["p_kl"][variant].make(torch.float32, torch.device(device)), "student_logits")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", [pytest.param(name, marks=pytest.mark.slow) for name in ("cut", "untruncated")])
def test_gold(monkeypatch, device, variant):
    shrink(monkeypatch, "gold", BLOCK=16, COMMON_BLOCK=2, GRADIENT_BLOCK=16, SLAB_BYTES=2000, PICK_BLOCK=16, SPARE=2)
    check("gold", CASES["gold"][variant].make(torch.float32, torch.device(device)), "student_logits")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["cut", pytest.param("wide_head_T2", marks=pytest.mark.slow)])
def test_gold_cross_entropy(monkeypatch, device, variant):
    shrink(monkeypatch, "gold", ROW_LANES=2, GRADIENT_BLOCK=16, GRADIENT_BLOCKS=2)
    inputs = CASES["gold_cross_entropy"][variant].make(torch.float32, torch.device(device))
    inputs["student_logits"][0, 0, 11:] = inputs["student_logits"][0, 0].max()  # the first of many equal ones
    inputs["targets"][0, 0] = 11
    check("gold_cross_entropy", inputs, "student_logits")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "spare", "sample"), [pytest.param(1, 0, 128, marks=pytest.mark.slow), (40, 3, 16)])
def test_gold_at_the_border_of_the_largest_picks_as_a_sort_would(monkeypatch, device, n, spare, sample):
    from xtoken_core.ops.chunks import chunk_positions
    from xtoken_core.ops.gold import triton as gold

    shrink(monkeypatch, "gold", PICK_BLOCK=32, SPARE=spare, SAMPLE=sample)
    logits = torch.randn(1, 8, 150, generator=torch.Generator().manual_seed(0))
    logits[0, 1] = logits[0, 1].round()  # ties at the border
    logits[0, 2] = 0.0
    logits[0, 3, 20:] = -torch.inf
    logits[0, 4, 7] = 200.0
    logits[0, 5, 9] = 10.0
    logits[0, 6, 3] = torch.nan
    logits = logits.to(device)
    uncommon = torch.tensor([v for v in range(150) if v % 4 != 1], dtype=torch.int32, device=device)
    side = gold.Side(logits, chunk_positions(torch.tensor([[0, 1, 2, 3, 4, 5, 6, -1]], device=device), 8))
    lse = side.log_sum_exp(1.0)
    rest = torch.log_softmax(logits[0, :6], dim=-1)[:, uncommon]
    mass = torch.zeros(8, device=device)
    values, places, ids = gold.Tail(side, lse, uncommon, n).descending(0, 8, 1.0, mass)
    assert values.shape == ids.shape == (8, n + spare)
    expected, order = rest.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(values[:6, :n], expected[:, :n].exp(), rtol=1e-5, atol=1e-10)
    picked = ids.gather(1, places[:, :n])[:6]
    same = picked == uncommon[order[:, :n]]
    assert bool((same | (values[:6, :n] == 0)).all())
    assert all(len(set(row.tolist())) == n for row in picked)
    torch.testing.assert_close(mass[:6], rest.exp().sum(1), rtol=1e-5, atol=1e-7)
    assert values[6, :n].isnan().all() and mass[6].isnan()
    assert torch.equal(values[7, :n], torch.ones_like(values[7, :n]))
    assert mass[7] == uncommon.shape[0]


@pytest.mark.parametrize("device", DEVICES)
def test_gold_of_picked_entries_is_gold_of_whole_lists(monkeypatch, device):
    shrink(monkeypatch, "gold", PICK_BLOCK=16, SAMPLE=16)
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(1, 4, V, generator=generator) for V in (40, 50))
    student[0, 1], teacher[0, 1] = student[0, 1].round(), teacher[0, 1].round()  # ties on either side
    student[0, 2] = teacher[0, 2, :40] = 0.0
    teacher[0, 2, 40:] = student[0, 3, 20:] = -torch.inf
    ids = torch.arange(50, device=device)
    partition = TokenPartition(ids[:6], ids[:6], ids[6:40], ids[6:])
    student, teacher = student.to(device).requires_grad_(), teacher.to(device)
    chunks = [torch.tensor([chunk_id], device=device) for chunk_id in ([0, 1, 2, 3], [0, 1, 2, 0])]
    op, found = load_backend(BACKENDS["gold"]["triton"]), []
    for spare in (2, 50):
        shrink(monkeypatch, "gold", SPARE=spare)
        l1 = op(student, teacher, partition, *chunks, GoldOptions(5, uncommon_topk=20)).l1_uncommon
        found.append((l1.detach(), torch.autograd.grad(l1.sum(), student)[0]))
    for picked, whole in zip(*found, strict=True):
        assert torch.equal(picked, whole)


@pytest.mark.parametrize("device", DEVICES)
def test_chunk_mean(monkeypatch, device):
    shrink(monkeypatch, "chunk_mean", BLOCK=8)
    check("chunk_mean", CASES["chunk_mean"][""].make(torch.float32, torch.device(device)), "x")


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_projection(monkeypatch, device):
    shrink(monkeypatch, "sparse_projection", BLOCK=4)
    check("sparse_projection", CASES["sparse_projection"][""].make(torch.float32, torch.device(device)), "x")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [32, 21])
def test_sparse_projection_of_rows_that_lie_as_columns(device, rows):
    """Lines of a multiple of 16 are read where they are, others are copied; the values are the same."""
    case = CASES["sparse_projection"][""].make(torch.float32, torch.device(device))
    x = torch.rand(rows, case["x"].shape[-1], generator=torch.Generator().manual_seed(1)).to(device)
    columns = x.t().contiguous().t()
    lines = importlib.import_module("xtoken_core.ops.sparse_projection.triton")._lines(columns)
    assert (lines.data_ptr() == columns.data_ptr()) == (rows % 16 == 0) and lines.stride(0) % 16 == 0
    assert torch.equal(lines[:, :rows], x.t()) and not lines[:, rows:].any()
    op = load_backend(BACKENDS["sparse_projection"]["triton"])
    found = [gradient(op, case | {"x": given}, "x") for given in (columns, x)]
    assert torch.equal(op(columns, case["projection"]), op(x, case["projection"])) and torch.equal(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_select_topk_columns(monkeypatch, device):
    shrink(monkeypatch, "select_topk_columns", ROW_BLOCK=4, COLUMN_BLOCK=8)
    logits = torch.randn(3, 5, 37, generator=torch.Generator().manual_seed(0)).to(device)
    chosen = [load_backend(BACKENDS["select_topk_columns"][short])(logits, 11) for short in ("triton", "reference")]
    assert torch.equal(*chosen)


@pytest.mark.parametrize("device", DEVICES)
def test_embedding(monkeypatch, device):
    shrink(monkeypatch, "embedding", folder="xtoken_core.compat", HIDDEN_BLOCK=8, PIECE=4)
    ids = torch.randint(3, (40,), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = {"token_ids": ids, "weight": torch.zeros(5, 19, device=device)}
    check("embedding", inputs, "weight")


@pytest.mark.gpu
@pytest.mark.parametrize("k", [700, 5000], ids=["topk", "full"])
def test_p_kl_at_thousands_of_tokens(k):
    device, V_s, V_t, T = torch.device("cuda"), 4999, 6007, 130
    generator = torch.Generator(device).manual_seed(0)
    indices = torch.randint(V_t, (V_s, 4), device=device, generator=generator)
    indices[:300, 0] = 17  # many students on one teacher token
    weights = torch.rand(V_s, 4, device=device, generator=generator)
    chunks = (torch.arange(T, device=device) // 3).repeat(2, 1)
    inputs = {
        "student_logits": 3 * torch.randn(2, T, V_s + 5, device=device, generator=generator)[..., :V_s],
        "teacher_logits": 3 * torch.randn(2, T, V_t + 9, device=device, generator=generator),
        "projection": ProjectionMatrix.from_topk(indices, weights, student_vocab_size=V_s, teacher_vocab_size=V_t),
        "columns": torch.randperm(V_t, device=device, generator=generator)[:k].sort().values,
        "student_chunk_id": chunks,
        "teacher_chunk_id": chunks,
        "options": PKLOptions(max_chunks=T // 3 + 1),
    }
    check("p_kl", inputs, "student_logits")


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [900, None], ids=["cut", "untruncated"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 2), (torch.bfloat16, 1)], ids=["fp32", "bf16_with_ties"])
def test_gold_at_thousands_of_tokens(monkeypatch, cut, dtype, size):
    shrink(monkeypatch, "gold", SPARE=300)  # fewer than are left out
    device, V_s, V_t, T = torch.device("cuda"), 4999, 6007, 130
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(V_t, device=device, generator=generator)
    # Means of several bfloat16 numbers tie up to rounding, and whose sign is whose is then chance: chunks of one.
    chunks = (torch.arange(T, device=device) // size).repeat(2, 1)
    ids = torch.arange(V_s, device=device)
    inputs = {
        "student_logits": 3 * torch.randn(2, T, V_s + 5, device=device, generator=generator, dtype=dtype)[..., :V_s],
        "teacher_logits": 3 * torch.randn(2, T, V_t + 9, device=device, generator=generator, dtype=dtype)[..., :V_t],
        "partition": TokenPartition(ids[:3000], order[:3000], ids[3000:], order[3000:].sort().values),
        "student_chunk_id": chunks,
        "teacher_chunk_id": chunks,
        "options": GoldOptions(T + 1, uncommon_topk=cut),
    }
    check("gold", inputs, "student_logits", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["p_kl", "p_kl_cross_entropy", "gold", "gold_cross_entropy"])
def test_more_positions_than_the_shorter_axes_of_a_grid(name):
    """Without a chunk but in the first and the last sample."""
    variant, device, B = "cut" if name.startswith("gold") else "", torch.device("cuda"), 11_000
    inputs = CASES[name][variant].make(torch.float32, device)
    for each in CASES[name][variant].batched:
        x = inputs[each]
        shape = (B - 3, *x.shape[1:])
        filler = torch.full(shape, -1, device=device) if each.endswith("chunk_id") else x.new_zeros(shape)
        inputs[each] = torch.cat([x[:1], filler, x[1:]])
    assert inputs["student_logits"].shape[:2].numel() > 65_535
    check(name, inputs, "student_logits")
