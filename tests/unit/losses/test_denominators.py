"""Denominators known from metadata equal those of the tensors, and a step may be split at will."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.losses.loss_cases import make_case, run
from xtoken_core.config import LossConfig
from xtoken_core.losses import ce_token_counts, combine_metrics, kd_chunk_counts, shifted_chunk_ids, valid_chunk_mask
from xtoken_core.losses.cross_entropy import next_token_weights

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


SEVERAL = {
    "same_tokenizer": (LossConfig(vocab_topk=None, temperature=2.0), {"same_tokenizer": (True,)}),
    "averaged_logits": (LossConfig(teacher_aggregation="averaged_logits"), {"same_tokenizer": (True, True)}),
    "sum": (
        LossConfig(vocab_topk=None, teacher_modes=("p_kl", "gold", None), normalize_teacher_by_vocab=True),
        {"same_tokenizer": (False, False, True), "teacher_vocab": (31, 19)},
    ),
}


@pytest.mark.parametrize(
    ("config", "shape"), [*((config, {}) for config in CONFIGS.values()), *SEVERAL.values()], ids=[*CONFIGS, *SEVERAL]
)
def test_axis_a_a_samples_gradient_is_bitwise_the_same_whatever_shares_the_batch(config, shape):
    case = make_case(lengths=(9, 4, 1, 12), seed=5, dtype=torch.float32, **shape)
    step = {"global_valid_toks": 22.0, "global_valid_chunks": [9.0] * len(case.teachers)}
    whole, _ = gradient_and_metrics(case, config, **step)
    for rows in ([0], [1, 3], [2, 0]):
        assert torch.equal(gradient_and_metrics(case.rows(rows), config, **step)[0], whole[rows])
