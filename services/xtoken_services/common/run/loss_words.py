"""A run's loss in words: names of its terms, and the weights with which they count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xtoken_core.config.loss import MODE_NAMES, LossConfig

SAME_TOKENIZER = "KL"
CROSS_ENTROPY = "cross-entropy"


def loss_of(spec: Mapping[str, Any]) -> LossConfig:
    """Return the loss's settings of a run's specification as JSON."""
    return LossConfig.model_validate(spec.get("loss") or {})


def names_by_teacher(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> list[str]:
    """Return the name of the divergence from every teacher.

    Args:
        spec: A run's specification as JSON.
        same_tokenizer: True for each teacher with the student's tokenizer; empty if that is not known yet.
    """
    loss = loss_of(spec)
    modes = [loss.mode_of(teacher) for teacher in range(len(spec.get("teacher") or ()))]
    same = [*same_tokenizer, *[False] * len(modes)]
    return [SAME_TOKENIZER if same[n] else MODE_NAMES.get(mode, mode) for n, mode in enumerate(modes)]


def divergence_name(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> str:
    """Return the name of the divergence from all teachers; empty without any.

    >>> divergence_name({"teacher": [{}, {}], "loss": {"mode": "alm", "teacher_modes": ["gold", None]}})
    'gold + ALM'
    """
    return " + ".join(dict.fromkeys(names_by_teacher(spec, same_tokenizer)))


def loss_in_words(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> str:
    """Return the terms of a run's loss, each with its weight if that is not 1.

    >>> loss_in_words({"teacher": [{}], "loss": {"mode": "chain", "kl_loss_weight": 1.0, "ce_loss_scale": 0.1}})
    'chain and cross-entropy (weight 0.1)'
    >>> loss_in_words({"teacher": [{}], "loss": {"mode": "chain", "kl_loss_weight_end": 0.0}})
    'chain (weight 1 to 0) and cross-entropy'
    """
    loss, divergence = loss_of(spec), divergence_name(spec, same_tokenizer)
    if not divergence:
        return CROSS_ENTROPY
    if loss.dynamic_loss_scaling:
        return f"{divergence} scaled to {CROSS_ENTROPY}"
    first, last = kd_weights(loss)
    weights = (divergence, first, last), (CROSS_ENTROPY, loss.ce_loss_scale, loss.ce_loss_scale)
    terms = [
        name if begin == end == 1 else f"{name} (weight {begin:g}{'' if begin == end else f' to {end:g}'})"
        for name, begin, end in weights
        if begin or end
    ]
    return " and ".join(terms) or "nothing: every weight is 0"


def kd_weights(loss: LossConfig) -> tuple[float, float]:
    """Return the weights of the divergence at the first and at the last step; 1 where it is scaled dynamically.

    Of an adaptive one both are its largest: its course depends on evaluations to come.
    """
    return (1.0, 1.0) if loss.dynamic_loss_scaling else (loss.kl_loss_weight, loss.last_kl_loss_weight)


def ce_weight(loss: LossConfig) -> float:
    """Return the weight of the cross-entropy."""
    return 1.0 if loss.dynamic_loss_scaling else loss.ce_loss_scale


def weighted(name: str, weight: float, last: float | None = None) -> str:
    """Return a term with its weight, which is left out if it is 1.

    Args:
        name: The term.
        weight: Its weight.
        last: Its weight at the last step, if that is another one.
    """
    constant = last is None or last == weight
    if constant and weight == 1:
        return name
    times = f"{weight:g}" if constant else f"({weight:g} to {last:g})"
    return f"({name}) × {times}" if " + " in name else f"{times} × {name}"
