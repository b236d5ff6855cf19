"""The loss utilities, denominators known from metadata, and steps that may be split over micro-batches and ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.preloaded import PRELOADED
from tests.unit.losses.loss_cases import V_S, loss_of, make_case, run
from tests.unit.losses.loss_loops import token_map
from xtoken_core import losses
from xtoken_core.config import LossConfig
from xtoken_core.losses import (
    Fp32SparseMM,
    LossTeacher,
    ce_token_counts,
    chunk_average_log_probs,
    combine_metrics,
    dp_all_reduce_sum,
    exact_token_map,
    kd_chunk_counts,
    shifted_chunk_ids,
    valid_chunk_mask,
)
from xtoken_core.losses.cross_entropy import next_token_weights

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sparse_matrix(device="cpu"):
    torch.manual_seed(1)
    dense = torch.rand(12, 17).masked_fill(torch.rand(12, 17) < 0.7, 0.0)
    return dense.to(device), dense.to_sparse().coalesce().to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_product_stays_in_float32_with_the_backward_inside_autocast(device):
    dense, sparse = sparse_matrix(device)
    x = torch.randn(12, 5, device=device, requires_grad=True)
    upstream = torch.randn(17, 5, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = Fp32SparseMM.apply(sparse, x)
        (y * upstream).sum().backward()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, dense.t() @ x.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, dense @ upstream, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sparse_product_returns_the_gradient_in_the_inputs_dtype(dtype):
    dense, sparse = sparse_matrix()
    x = torch.randn(12, 5, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Fp32SparseMM.apply(sparse, x)
        y.sum().backward()
    torch.testing.assert_close(y, dense.t() @ x.detach().float())
    assert x.grad.dtype == dtype


def test_sparse_product_in_float64_passes_gradcheck():
    _, sparse = sparse_matrix()
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Fp32SparseMM.apply(sparse, x), x)


def test_chunk_average_divides_by_the_chunks_size():
    log_probs = torch.arange(8.0).view(1, 4, 2)
    means, sizes = chunk_average_log_probs(log_probs, torch.tensor([[0, 0, -1, 2]]), 4)
    assert sizes.tolist() == [[2.0, 0.0, 1.0, 0.0]]
    assert means.tolist() == [[[1.0, 2.0], [0.0, 0.0], [6.0, 7.0], [0.0, 0.0]]]


def test_chunk_average_ignores_what_is_in_no_chunk():
    log_probs = torch.full((1, 3, 2), -torch.inf)
    log_probs[0, 1] = 1.0
    means, _ = chunk_average_log_probs(log_probs, torch.tensor([[-1, 0, 7]]), 2)
    assert means.tolist() == [[[1.0, 1.0], [0.0, 0.0]]]


def test_a_sum_without_process_group_is_a_fresh_float32_copy():
    local = torch.tensor(5)
    total = dp_all_reduce_sum(local)
    assert total.dtype == torch.float32
    assert total == 5
    same = torch.tensor(5.0)
    dp_all_reduce_sum(same).add_(1)
    assert same == 5


MIXED = {"same_tokenizer": (False, False, True), "teacher_vocab": (31, 19), "weights": (1.0, 0.5, 2.0)}
SPLIT = {
    "p_kl": (LossConfig(vocab_topk=None), {}),
    "p_kl_prob_exact_only": (
        LossConfig(vocab_topk=None, teacher_chunk_average="prob", exact_token_match_only=True),
        {},
    ),
    "gold": (LossConfig(mode="gold", uncommon_topk=5), {}),
    "h_kl_reverse": (LossConfig(mode="h_kl", reverse_kl=True), {}),
    "uld": (LossConfig(mode="uld", temperature=2.0), {}),
    "alm": (LossConfig(mode="alm"), {}),
    "same_tokenizer": (LossConfig(vocab_topk=None), {"same_tokenizer": (True,)}),
    "averaged_logits": (LossConfig(teacher_aggregation="averaged_logits"), {"same_tokenizer": (True, True)}),
    "sum": (LossConfig(vocab_topk=None, teacher_modes=("p_kl", "gold", None), normalize_teacher_by_vocab=True), MIXED),
    "select_teacher": (LossConfig(teacher_aggregation="select_teacher", vocab_topk=None), MIXED | {"weights": None}),
}
"""Settings under which a step's gradient does not depend on its split; a teacher is chosen per micro-batch, so
`select_teacher` counts only where every rank chooses the same."""


def step_case(name):
    case = make_case(lengths=(9, 4, 1, 12), seed=5, **SPLIT[name][1])
    if name == "select_teacher":  # the second teacher knows its text
        ids = case.batch["teacher_1_input_ids"]
        case.teacher_logits[1][:, :-1].scatter_(2, ids[:, 1:, None], 20.0)
    return case


def gradient_of_step(name, case, over_ranks):
    """The student's gradient and the divergence, under denominators that `over_ranks` sums."""
    config = SPLIT[name][0]
    loss_fn = loss_of(case, config)
    chunks = []
    for place, teacher in enumerate(case.teachers):
        infix = f"{place}_" if len(case.teachers) > 1 else ""
        own = torch.zeros(1) if teacher.same_tokenizer else counts(case, config, place, infix)
        chunks.append(over_ranks(own.sum()))
    selected = {}
    if config.teacher_aggregation == "select_teacher":
        selected["global_selected_chunks"] = over_ranks(loss_fn.select(case.batch, case.teacher_logits)[1])
    logits = case.student_logits.requires_grad_()
    toks = over_ranks(ce_token_counts(case.batch["token_mask"]).sum())
    loss, metrics = loss_fn(
        case.batch, logits, case.teacher_logits, global_valid_toks=toks, global_valid_chunks=chunks, **selected
    )
    loss.backward()
    return {"gradient": logits.grad, "kl_loss": metrics["kl_loss"]}


def _rank(rank, path, rows):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    found = {name: gradient_of_step(name, step_case(name).rows(rows[rank]), dp_all_reduce_sum) for name in SPLIT}
    torch.save(found, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_make_the_same_step_as_one(tmp_path):
    rows = [[0, 2], [1, 3]]
    mp.start_processes(_rank, args=(str(tmp_path), rows), nprocs=2, start_method=PRELOADED)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in SPLIT:
        whole = gradient_of_step(name, step_case(name), dp_all_reduce_sum)
        assert whole["kl_loss"] != 0
        for rank, chosen in zip(ranks, rows, strict=True):
            torch.testing.assert_close(
                rank[name]["gradient"],
                whole["gradient"][chosen],
                rtol=1e-6,
                atol=1e-9,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        torch.testing.assert_close(ranks[0][name]["kl_loss"] + ranks[1][name]["kl_loss"], whole["kl_loss"])


@examples(25, 100)
@given(seed=st.integers(0, 10**6), relaxed=st.booleans())
def test_the_exact_map_is_the_plain_loops(seed, relaxed):
    torch.manual_seed(seed)
    indices = torch.randint(-1, 9, (V_S, 3))
    likelihoods = torch.tensor([1.0, 0.7, 0.6, 0.4, 0.0])[torch.randint(5, (V_S, 3))]
    indices[::2, 1:], likelihoods[::2, 1:] = -1, 0.0
    expected = token_map(LossTeacher(7, indices, likelihoods), V_S, relaxed)
    parts = exact_token_map(indices, likelihoods, relaxed=relaxed, teacher_vocab_size=7)
    names = ("common_student", "common_teacher", "uncommon_student", "uncommon_teacher")
    assert [parts[name].tolist() for name in names] == list(expected)


def test_the_exact_map_of_one_slot_needs_only_the_weight():
    indices, likelihoods = torch.tensor([[3], [3], [9], [-1]]), torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    parts = exact_token_map(indices, likelihoods, relaxed=False, teacher_vocab_size=5)
    assert parts["common_student"].tolist() == [0]
    assert parts["common_teacher"].tolist() == [3]
    assert parts["uncommon_student"].tolist() == [1, 2, 3]
    assert parts["uncommon_teacher"].tolist() == [0, 1, 2, 4]


def test_the_relaxed_map_prefers_the_heavier_row_then_the_lower():
    indices = torch.tensor([[0, 1], [0, 2], [0, 3]])
    likelihoods = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.9, 0.1]])
    parts = exact_token_map(indices, likelihoods, relaxed=True, teacher_vocab_size=4)
    assert parts["common_student"].tolist() == [1]


@pytest.mark.parametrize("name", losses.__all__)
def test_every_exported_name_exists(name):
    assert getattr(losses, name) is not None


CONFIGS = {
    "p_kl": LossConfig(vocab_topk=None),
    "exact_only": LossConfig(vocab_topk=None, exact_token_match_only=True, temperature=2.0),
    "prob": LossConfig(vocab_topk=None, teacher_chunk_average="prob", reverse_kl=True),
    "gold": LossConfig(mode="gold", uncommon_topk=5),
    "h_kl": LossConfig(mode="h_kl"),
    "uld": LossConfig(mode="uld"),
    "alm": LossConfig(mode="alm"),
}


def counts(case, config, teacher=0, infix=""):
    b = case.batch
    columns = ("student_chunk_id", "teacher_chunk_id", "pair_valid", "pair_is_correct")
    return kd_chunk_counts(*(b[f"alignment_{infix}{name}"] for name in columns), config, teacher=teacher)


def gradient_and_metrics(case, config, **denominators):
    return run(case, config, **denominators)[1:]


def test_the_shift_moves_ids_to_the_predicting_position():
    ids = torch.tensor([[0, 0, 1, -1], [-1, 2, 2, 3]])
    assert shifted_chunk_ids(ids).tolist() == [[0, 1, -1, -1], [2, 2, 3, -1]]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_any_weights_are_no_targets_of_the_cross_entropy(packed):
    """Text has the version -1; the first weights have the version 0."""
    shape = (1, 9) if packed else (3, 3)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "token_mask": torch.ones(shape, dtype=torch.int64),
        "sample_mask": torch.ones(3),
        "weights_version": torch.tensor([-1, 0, 4]),
    }
    if packed:
        batch["packed_sample"] = torch.arange(3).repeat_interleave(3)[None]
    weights = next_token_weights(batch)
    assert weights.tolist() == ([[1, 1, 0, 0, 0, 0, 0, 0]] if packed else [[1, 1], [0, 0], [0, 0]])


def test_a_chunk_needs_both_sides_and_a_valid_pair():
    s, t = torch.tensor([[1.0, 0.0, 2.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0, 3.0]])
    pair_valid = torch.tensor([[True, True, True, False]])
    assert valid_chunk_mask(s, t, pair_valid).tolist() == [[True, False, False, False]]


def test_a_chunk_whose_only_token_is_the_first_is_lost_in_the_shift():
    ids = torch.tensor([[0, 1, 2]])
    every = torch.ones(1, 3, dtype=torch.bool)
    assert kd_chunk_counts(ids, ids, every, every, LossConfig(mode="p_kl")).tolist() == [2]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_counts_from_metadata_equal_the_losss_own(config, seed, lengths):
    case = make_case(lengths=tuple(lengths), seed=seed)
    _, metrics = gradient_and_metrics(case, config)
    name = "num_valid_pairs_t0" if config.mode == "p_kl" else "num_valid_chunks_t0"
    assert counts(case, config).sum() == metrics[name]
    assert ce_token_counts(case.batch["token_mask"]).tolist() == [n - 1 for n in lengths]


def test_exact_only_counts_only_correct_pairs():
    case = make_case(lengths=(12, 12), seed=3)
    strict = counts(case, CONFIGS["exact_only"])
    assert (strict < counts(case, CONFIGS["p_kl"])).any()
    assert torch.equal(counts(case, CONFIGS["gold"]), counts(case, CONFIGS["p_kl"]))


@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[3], [0, 2], [1]]], ids=["halves", "shuffled"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_step_may_be_split_into_micro_batches(config, split):
    case = make_case(lengths=(9, 4, 1, 12), seed=5)
    toks = ce_token_counts(case.batch["token_mask"]).sum().item()
    chunks = counts(case, config).sum()
    whole, expected = gradient_and_metrics(case, config)
    parts = [
        gradient_and_metrics(case.rows(rows), config, global_valid_toks=toks, global_valid_chunks=[chunks])
        for rows in split
    ]
    for rows, (gradient, _) in zip(split, parts, strict=True):
        torch.testing.assert_close(gradient, whole[rows], rtol=1e-7, atol=1e-11)
    combined = combine_metrics(metrics for _, metrics in parts)
    assert combined.keys() == expected.keys()
    for name, value in expected.items():
        assert combined[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name


WITHOUT_A_CHOICE = ("same_tokenizer", "averaged_logits", "sum")


@pytest.mark.parametrize(
    ("config", "shape"),
    [*((config, {}) for config in CONFIGS.values()), *(SPLIT[name] for name in WITHOUT_A_CHOICE)],
    ids=[*CONFIGS, *WITHOUT_A_CHOICE],
)
def test_axis_a_a_samples_gradient_is_bitwise_the_same_whatever_shares_the_batch(config, shape):
    case = make_case(lengths=(9, 4, 1, 12), seed=5, dtype=torch.float32, **shape)
    step = {"global_valid_toks": 22.0, "global_valid_chunks": [9.0] * len(case.teachers)}
    whole, _ = gradient_and_metrics(case, config, **step)
    for rows in ([0], [1, 3], [2, 0]):
        assert torch.equal(gradient_and_metrics(case.rows(rows), config, **step)[0], whole[rows])


def test_several_teachers_each_have_their_own_denominator():
    config = LossConfig(vocab_topk=None, teacher_modes=("p_kl", "gold", None), reverse_kl=True)
    case = make_case(same_tokenizer=(False, False, True), weights=(1.0, 0.5, 2.0), teacher_vocab=(31, 19), seed=8)
    chunks = [counts(case, config, 0, "0_").sum(), counts(case, config, 1, "1_").sum(), None]
    toks = ce_token_counts(case.batch["token_mask"]).sum()
    whole, _ = gradient_and_metrics(case, config)
    for rows in ([0, 1], [2, 3]):
        gradient, _ = gradient_and_metrics(case.rows(rows), config, global_valid_toks=toks, global_valid_chunks=chunks)
        torch.testing.assert_close(gradient, whole[rows], rtol=1e-7, atol=1e-11)
