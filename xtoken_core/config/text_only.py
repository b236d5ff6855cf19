"""The loss of a run without teachers."""

from __future__ import annotations

from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.loss import LossConfig

CROSS_ENTROPY_ONLY = {"kl_loss_weight": 0.0, "ce_loss_scale": 1.0}


def check_without_teachers(loss: LossConfig, held_out: EvalSpec | None) -> None:
    """Refuse settings that compare with a teacher in a run that has none.

    Raises:
        ValueError: The first of them.
    """
    mode = loss.mode if loss.mode == "p_kl" else "chain"  # neither names anything about a teacher
    plain = LossConfig.model_validate({**CROSS_ENTROPY_ONLY, "mode": mode, "ce_loss_scale": loss.ce_loss_scale})
    given = {name: getattr(loss, name) for name in LossConfig.model_fields}
    if not given["kl_loss_weight_end"]:  # as much as the default, where nothing is weighed
        del given["kl_loss_weight_end"]
    other = next((name for name, value in given.items() if value != getattr(plain, name)), None)
    other = f"loss.{other}" if other else "eval.teacher_kl" if held_out is not None and held_out.teacher_kl else None
    if other:
        raise ValueError(f"{other} compares with a teacher, and this run has none: unset it, or name a [teacher]")
