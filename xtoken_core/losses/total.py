"""From what was compared to one number: each teacher's share, the cross-entropy, their weights, the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import Scalar, detached
from xtoken_core.losses.comparison import Values
from xtoken_core.losses.cross_entropy import mean_over_tokens
from xtoken_core.losses.teacher_loss import TeacherLoss

Metrics = dict[str, Tensor]


class Selection(NamedTuple):
    """The teacher that `select_teacher` follows on a micro-batch.

    Attributes:
        chosen: Its place, the lowest on ties.
        chunks: What it adds to the step's denominator, float32.
    """

    chosen: Int[Tensor, ""]
    chunks: Float[Tensor, ""]

    @classmethod
    def nothing(cls, device: torch.device) -> Selection:
        """That of a micro-batch without samples."""
        return cls(torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device))


class Shares(NamedTuple):
    """How much each teacher counts on a micro-batch; with `select_teacher` also which one, and over how many chunks."""

    weights: Sequence[Scalar]
    selection: Selection | None = None
    selected_chunks: Scalar | None = None


class Total:
    """The loss of a micro-batch as a function of what was compared; linear unless it is scaled dynamically."""

    def __init__(
        self,
        config: LossConfig,
        losses: Sequence[TeacherLoss],
        factors: Sequence[float],
        batch: Mapping[str, Tensor],
        denominators: Sequence[Scalar | None],
        global_valid_toks: Scalar | None,
        shares: Shares,
    ) -> None:
        """Args: the loss's settings; its teachers; what else each is multiplied by; the rest of a call."""
        self.config, self.losses, self.factors = config, losses, factors
        self.batch, self.denominators, self.toks, self.shares = batch, denominators, global_valid_toks, shares

    def __call__(self, values: Values) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss and its metrics."""
        kd, metrics = self._divergence(values)
        ce = mean_over_tokens(self.batch, values.losses, values.hits, self.toks)
        scale = self._kl_scale(kd, ce.loss)
        ce_scale = 1.0 if self.config.dynamic_loss_scaling else self.config.ce_loss_scale
        loss = scale * kd + ce_scale * ce.loss
        summary: dict[str, Scalar] = {
            "loss": loss,
            "kl_loss": kd,
            "ce_loss": ce.loss,
            "kl_loss_scale": scale,
            "accuracy": ce.accuracy,
            "num_valid_samples": float(values.losses.shape[0]),
        }
        return loss, {name: detached(value, loss) for name, value in (summary | metrics).items()}

    def _divergence(self, values: Values) -> tuple[Tensor, dict[str, Scalar]]:
        """The weighed divergence and its metrics."""
        weights = self.shares.weights
        parts = list(zip(self.losses, values.divergences, self.denominators, strict=False))
        terms = [part.term(self.batch, divergence, denominator) for part, divergence, denominator in parts]
        metrics: dict[str, Scalar] = {f"weight_t{place}": weight for place, weight in enumerate(weights)}
        if self.config.teacher_aggregation == "averaged_logits":
            return terms[0].kd, metrics | terms[0].metrics
        for place, term in enumerate(terms):
            metrics[f"kl_loss_t{place}"] = term.kd
            metrics |= {f"{name}_t{place}": value for name, value in term.metrics.items()}
        selection = self.shares.selection
        if selection is not None:
            metrics["num_selected_chunks"] = selection.chunks
            step = self.shares.selected_chunks  # what is trained has one denominator, whoever was chosen
            kds = [part.term(self.batch, divergence, step).kd for part, divergence, _ in parts]
            return at(torch.stack(kds), selection.chosen), metrics
        weighed = zip(weights, self.factors, terms, strict=True)
        return torch.stack([weight * factor * term.kd for weight, factor, term in weighed]).sum(), metrics

    def _kl_scale(self, kd: Tensor, ce: Tensor) -> Scalar:
        if not self.config.dynamic_loss_scaling:
            return self.config.kl_loss_weight
        kd, ce = kd.detach().abs(), ce.detach().abs()
        scale = torch.where(kd == 0, 1.0, ce / torch.where(kd == 0, 1.0, kd))
        cap = self.config.dynamic_loss_scale_cap
        return scale if cap is None else scale.clamp(max=cap)


def at(values: Tensor, place: Tensor) -> Tensor:
    """One entry of a vector, chosen on the device."""
    return values.gather(0, place.unsqueeze(0)).squeeze(0)
