"""Impossible combinations of loss settings are refused with the reason."""

import pytest
from pydantic import ValidationError

from tests.support.cases import cases
from xtoken_core.config import LossConfig

REFUSED = {
    "xtoken_without_gold": ({"xtoken_loss": True}, "set gold_loss = true"),
    "mode_and_flag": ({"mode": "alm", "gold_loss": True}, "exclude each other: unset gold_loss"),
    "mode_and_unset_flag": ({"mode": "gold", "gold_loss": False}, "gold_loss = false exclude each other"),
    "mode_and_half_of_h_kl": ({"mode": "gold", "gold_loss": True, "xtoken_loss": True}, "unset xtoken_loss"),
    "flag_of_another_type": ({"gold_loss": "perhaps"}, "gold_loss takes true or false"),
    "unknown_mode": ({"mode": "kl"}, "mode"),
    "two_modes": ({"gold_loss": True, "uld_loss": True}, "exclude each other"),
    "alm_and_gold": ({"gold_loss": True, "alm_loss": True}, "exclude each other"),
    "kl_weight_with_scaling": (
        {"dynamic_loss_scaling": True, "kl_loss_weight": 0.5},
        "kl_loss_weight is not used with",
    ),
    "kl_weight_end_with_scaling": (
        {"dynamic_loss_scaling": True, "kl_loss_weight_end": 0.0},
        "kl_loss_weight_end is not used with",
    ),
    "kl_weight_end_alone": ({"kl_loss_weight_end": 0.5, "ce_loss_scale": 0.0}, "whose weight is 0: unset it"),
    "kl_weight_end_below_0": ({"kl_loss_weight_end": -0.5}, "kl_loss_weight_end"),
    "kl_weight_end_in_words": ({"kl_loss_weight_end": "zero"}, "kl_loss_weight_end"),
    "in_place_without_kd": (
        {"gradient_in_place": True, "kl_loss_weight": 0.0, "kl_loss_weight_end": 0.0},
        "whose weight is 0",
    ),
    "ce_scale_with_scaling": ({"dynamic_loss_scaling": True, "ce_loss_scale": 0.5}, "ce_loss_scale is not used with"),
    "exact_only_gold": ({"gold_loss": True, "exact_token_match_only": True}, "belongs to P-KL, the mode is gold"),
    "prob_gold": ({"gold_loss": True, "teacher_chunk_average": "prob"}, "belongs to P-KL, the mode is gold"),
    "reverse_uld": ({"uld_loss": True, "reverse_kl": True}, 'no meaning for mode = "uld"'),
    "temperature_alm": ({"alm_loss": True, "temperature": 2.0}, "use alm_temperature"),
    "alm_temperature_elsewhere": ({"alm_temperature": 10.0}, "belongs to ALM, the mode is chain"),
    "modes_select": ({"teacher_aggregation": "select_teacher", "teacher_modes": ("gold",)}, "teacher_modes belongs to"),
    "dynamic_weights_averaged": (
        {"teacher_aggregation": "averaged_logits", "dynamic_teacher_weights": "ce"},
        "dynamic_teacher_weights belongs to",
    ),
    "normalised_select": (
        {"teacher_aggregation": "select_teacher", "normalize_teacher_by_vocab": True},
        "normalize_teacher_by_vocab belongs to",
    ),
    "averaged_gold": ({"teacher_aggregation": "averaged_logits", "gold_loss": True}, "compares token by token"),
    "reverse_and_beta": ({"mode": "chain", "reverse_kl": True, "beta": 0.5}, "two forms of the divergence"),
    "beta_elsewhere": ({"mode": "p_kl", "beta": 0.5}, "beta belongs to chain, the mode is p_kl"),
    "chain_option_elsewhere": (
        {"mode": "p_kl", "chain_without": ["end_terms"]},
        "chain_without belongs to chain, the mode is p_kl",
    ),
    "averaged_alm": ({"teacher_aggregation": "averaged_logits", "mode": "alm"}, "compares token by token"),
    "exact_only_chain": ({"mode": "chain", "exact_token_match_only": True}, "belongs to P-KL, the mode is chain"),
    "zero_temperature": ({"temperature": 0.0}, "temperature"),
    "zero_topk": ({"vocab_topk": 0}, "vocab_topk"),
    "unknown": ({"vocab_top_k": 5}, "vocab_top_k"),
}


@pytest.mark.parametrize(("settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_impossible_settings_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        LossConfig(**settings)


@cases(
    "settings, reason",
    ({"mode": "chain", "reverse_kl": True}, "biased on given text"),
    ({"teacher_modes": ("p_kl", "chain"), "reverse_kl": True}, "biased on given text"),
    ({"mode": "chain", "beta": 0.5}, "a generalised JSD has a reverse part"),
)
def test_reverse_forms_of_chain_are_refused_on_given_text(settings, reason):
    with pytest.raises(ValueError, match=reason):
        LossConfig(**settings).check_given_text()


@cases(
    "settings, mode",
    ({"gold_loss": False}, "p_kl"),
    ({"gold_loss": True}, "gold"),
    ({"gold_loss": True, "xtoken_loss": True}, "h_kl"),
    ({"uld_loss": True}, "uld"),
    ({"alm_loss": True}, "alm"),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags_name_one_mode(settings, mode):
    every = dict.fromkeys(("gold_loss", "xtoken_loss", "uld_loss", "alm_loss"), False)
    assert LossConfig(**settings).mode == mode
    assert LossConfig(**settings) == LossConfig(**every | settings) == LossConfig(mode=mode, **settings)
    assert LossConfig(**settings) == LossConfig(mode=mode)
    assert LossConfig(**settings).model_dump()["mode"] == mode


def test_a_setting_of_one_teachers_mode_is_allowed():
    config = LossConfig(gold_loss=True, teacher_modes=("p_kl", None), exact_token_match_only=True)
    assert [config.mode_of(i) for i in range(2)] == ["p_kl", "gold"]
    assert config.modes == {"p_kl", "gold"}


def test_a_dumped_config_can_be_read_back():
    config = LossConfig(alm_loss=True, alm_temperature=7.0, teacher_modes=("alm", "gold"))
    assert LossConfig.model_validate(config.model_dump()) == config
    assert LossConfig.model_validate_json(config.model_dump_json()) == config


@cases(
    "settings",
    {"vocab_topk": 64},
    {"uncommon_topk": 64},
    {"exact_token_match_only": True},
    {"reverse_kl": False},
    {"teacher_chunk_average": "prob"},
    {"gradient_in_place": False},
    {"xtoken_loss": False},
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_the_public_method_without_a_mode_mean_it(settings):
    assert LossConfig(**settings) == LossConfig(mode="p_kl", **settings)
    assert LossConfig(**settings).ce_loss_scale == 0.1


def test_the_default_is_chain_with_equal_weights():
    config = LossConfig(mode="chain", kl_loss_weight=1.0, ce_loss_scale=1.0)
    assert LossConfig() == LossConfig(mode="chain") == LossConfig(temperature=1.0) == config
    assert LossConfig(mode="chain", vocab_topk=64).mode == "chain"


@pytest.mark.parametrize("mode", ["p_kl", "gold", "alm", "custom"])
def test_other_modes_weigh_the_cross_entropy_as_published(mode):
    assert LossConfig(mode=mode).ce_loss_scale == 0.1
    assert LossConfig(mode=mode, ce_loss_scale=1.0).ce_loss_scale == 1.0
    assert LossConfig.model_validate(LossConfig(mode=mode, dynamic_loss_scaling=True).model_dump()).mode == mode


def test_chain_may_be_set_where_every_teacher_has_the_students_tokenizer():
    LossConfig(mode="chain").check_teachers([1.0], [True])
    with pytest.raises(ValueError, match="used by no teacher"):
        LossConfig(mode="gold").check_teachers([1.0], [True])
