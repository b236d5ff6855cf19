"""The loss's settings, named as in the method's public configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from xtoken_core.config.base import Part

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class LossConfig(Part):
    """Which loss compares student and teacher, and how its parts are weighed.

    The default is P-KL. `gold_loss` compares common tokens by KL and the rest by sorted L1; `xtoken_loss` on top
    of it (H-KL) widens what counts as common.
    """

    gold_loss: bool = False
    xtoken_loss: bool = False
    temperature: Positive = 1.0
    vocab_topk: Annotated[int, Field(ge=1)] = 8192
    """P-KL: how many teacher tokens are compared; as many as the vocabulary has, if it has fewer."""
    uncommon_topk: Annotated[int, Field(ge=1)] = 8192
    """gold, H-KL: where the sorted lists of uncommon tokens are cut."""
    reverse_kl: bool = False
    exact_token_match_only: bool = False
    """P-KL: leave out chunks whose two sides do not spell the same bytes."""
    teacher_chunk_average: Literal["log_prob", "prob"] = "log_prob"
    """P-KL: how a chunk's teacher positions are averaged; `prob` keeps a true distribution."""
    kl_loss_weight: NonNegative = 1.0
    ce_loss_scale: NonNegative = 0.1
    dynamic_loss_scaling: bool = False
    """Scale the KD term to the cross-entropy's size at every micro-batch; replaces both weights above."""
    dynamic_loss_scale_cap: Positive | None = None

    @property
    def mode(self) -> Literal["p_kl", "gold", "h_kl"]:
        """The loss's short name."""
        if self.gold_loss:
            return "h_kl" if self.xtoken_loss else "gold"
        return "p_kl"

    @model_validator(mode="after")
    def _refuse_impossible(self) -> LossConfig:
        if self.xtoken_loss and not self.gold_loss:
            raise ValueError("xtoken_loss widens the gold loss's common tokens: set gold_loss = true as well")
        if self.gold_loss and self.exact_token_match_only:
            raise ValueError("exact_token_match_only belongs to P-KL: unset it or gold_loss")
        if self.gold_loss and self.teacher_chunk_average == "prob":
            raise ValueError('teacher_chunk_average = "prob" belongs to P-KL: unset it or gold_loss')
        if self.dynamic_loss_scale_cap is not None and not self.dynamic_loss_scaling:
            raise ValueError("dynamic_loss_scale_cap needs dynamic_loss_scaling = true")
        return self
