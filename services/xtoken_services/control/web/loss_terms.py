"""Names of a run's losses, and the weights with which they count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xtoken_core.config.loss import MODE_NAMES
from xtoken_services.control.web.formatting import number

SAME_TOKENIZER = "KL"
CROSS_ENTROPY = "cross-entropy"


def names_by_teacher(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> list[str]:
    """Return the name of the divergence from every teacher.

    Args:
        spec: A run's specification as JSON.
        same_tokenizer: True for each teacher with the student's tokenizer; empty if that is not known yet.
    """
    loss = spec.get("loss") or {}
    own = loss.get("teacher_modes") or ()
    names = []
    for teacher in range(len(spec.get("teacher") or ())):
        mode = (own[teacher] if teacher < len(own) else None) or loss.get("mode", "chain")
        same = teacher < len(same_tokenizer) and same_tokenizer[teacher]
        names.append(SAME_TOKENIZER if same else MODE_NAMES.get(mode, str(mode)))
    return names


def divergence_name(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> str:
    """Return the name of the divergence from all teachers; empty without any.

    >>> divergence_name({"teacher": [{}, {}], "loss": {"mode": "alm", "teacher_modes": ["gold", None]}})
    'gold + ALM'
    """
    return " + ".join(dict.fromkeys(names_by_teacher(spec, same_tokenizer)))


def loss_in_words(spec: Mapping[str, Any], same_tokenizer: Sequence[bool] = ()) -> str:
    """Return a run's loss as a sum of weighted terms.

    >>> loss_in_words({"teacher": [{}], "loss": {"mode": "chain", "kl_loss_weight": 1.0, "ce_loss_scale": 0.1}})
    'chain + 0.1 × cross-entropy'
    >>> loss_in_words({"teacher": [{}], "loss": {"mode": "chain", "kl_loss_weight_end": 0.0}})
    '(1 to 0) × chain + cross-entropy'
    """
    loss = spec.get("loss") or {}
    divergence = divergence_name(spec, same_tokenizer)
    if not divergence:
        return CROSS_ENTROPY
    if loss.get("dynamic_loss_scaling"):
        return f"{divergence} scaled to {CROSS_ENTROPY}"
    first, last = kd_weights(spec)
    weight = ce_weight(spec)
    terms = [weighted(divergence, first, last)] if first or last else []
    terms += [weighted(CROSS_ENTROPY, weight)] if weight else []
    return " + ".join(terms) or "0"


def kd_weights(spec: Mapping[str, Any]) -> tuple[float, float]:
    """Return the weights of the divergence at the first and at the last step; 1 where it is scaled dynamically.

    Of an adaptive one both are its largest: its course depends on evaluations to come.
    """
    loss = spec.get("loss") or {}
    if loss.get("dynamic_loss_scaling"):
        return 1.0, 1.0
    first, last = loss.get("kl_loss_weight", 1.0), loss.get("kl_loss_weight_end")
    return float(first), float(last if isinstance(last, (int, float)) else first)


def ce_weight(spec: Mapping[str, Any]) -> float:
    """Return the weight of the cross-entropy."""
    loss = spec.get("loss") or {}
    return 1.0 if loss.get("dynamic_loss_scaling") else float(loss.get("ce_loss_scale", 1.0))


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
    times = number(weight) if constant else f"({number(weight)} to {number(last)})"
    return f"({name}) × {times}" if " + " in name else f"{times} × {name}"
