"""The objective of a micro-batch: every teacher's divergence and the cross-entropy, weighted into one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.base import Loss
from xtoken_core.losses.chunk_classes import class_members, class_metrics, generated_chunks
from xtoken_core.losses.common import (
    Divergence,
    LossInput,
    Pairing,
    Scalar,
    TeacherTerm,
    detached,
    masked_sum,
    partial_mean,
)
from xtoken_core.losses.cross_entropy import mean_over_tokens
from xtoken_core.losses.importance import chunk_weights
from xtoken_core.losses.lazy_logits import HeadProjection, Logits, MeanLogits, row_logits
from xtoken_core.losses.masks import generated_tokens, next_token_targets
from xtoken_core.ops import get_op
from xtoken_core.topk_logits import TopKLogits

Metrics = dict[str, Tensor]


class Values(NamedTuple):
    """Everything that a loss reduces: each teacher's divergence, the student's cross-entropy and hits.

    Attributes:
        divergences: One per teacher.
        losses: Cross-entropy of every position, in nats.
        hits: True where the position's first guess is right.
    """

    divergences: tuple[Divergence, ...]
    losses: Float[Tensor, "B T_s"]
    hits: Bool[Tensor, "B T_s"]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors through which the loss has gradients."""
        return [part for divergence in self.divergences for part in divergence.parts] + [self.losses]

    def detached(self) -> Values:
        """Return the values without their graph."""
        divergences = [d._replace(parts=tuple(p.detach() for p in d.parts), tokens=None) for d in self.divergences]
        return Values(tuple(divergences), self.losses.detach(), self.hits)

    @classmethod
    def zeros(cls, teachers: Sequence[ComparedTeacher], targets: Int[Tensor, "B T_s"], dtype: torch.dtype) -> Values:
        """Return values of the right shapes, all zero.

        Args:
            teachers: The teachers that are compared.
            targets: The ids that the student's positions predict.
            dtype: The dtype of the student's logits.
        """
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        divergences = [
            Divergence(tuple(targets.new_zeros(t.shape, dtype=exact) for _ in range(t.loss.parts))) for t in teachers
        ]
        losses = targets.new_zeros(targets.shape, dtype=exact)
        return cls(tuple(divergences), losses, torch.zeros_like(targets, dtype=torch.bool))


@dataclass(frozen=True)
class ComparedTeacher:
    """One teacher of a micro-batch.

    Attributes:
        loss: The loss that compares it.
        logits: Its logits, in any form.
        columns: `[K]` int64 tokens that are compared; None: all.
        pairing: Which positions belong together.
    """

    loss: Loss
    logits: Logits | MeanLogits
    columns: Tensor | None
    pairing: Pairing

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of its divergence: `(B, P)`, with the student's tokenizer `(B, T_s)`."""
        B, T = self.pairing.student_targets.shape
        return (B, T) if self.pairing.student_chunk_id is None else (B, self.pairing.max_chunks)

    @property
    def subset(self) -> Tensor | None:
        """The compared tokens, unless they are the whole vocabulary."""
        return None if self.columns is None or self.columns.shape[0] == self.loss.vocab_size else self.columns

    def whole(self) -> tuple[Tensor | TopKLogits, bool]:
        """Return the logits of every position, and True if they are those of `columns` only."""
        if isinstance(self.logits, TopKLogits):
            return self.logits, False
        if isinstance(self.logits, HeadProjection):
            return self.logits.logits(self.subset), self.subset is not None
        return (self.logits if isinstance(self.logits, Tensor) else self.logits.whole()), False

    def rows(self) -> tuple[Callable[[Tensor], Tensor | TopKLogits], bool]:
        """Return a function from positions to logits, and True if they are those of `columns` only."""
        if isinstance(self.logits, TopKLogits):
            return self.logits.rows, False
        if isinstance(self.logits, MeanLogits):
            return self.logits.rows(), False
        return row_logits(self.logits, self.loss.vocab_size, self.subset), self.subset is not None


class Selection(NamedTuple):
    """The teacher that `select_teacher` follows on a micro-batch.

    Attributes:
        chosen: Its number, the lowest on ties; int64.
        chunks: What it adds to the step's denominator, float32.
    """

    chosen: Int[Tensor, ""]
    chunks: Float[Tensor, ""]

    @classmethod
    def nothing(cls, device: torch.device) -> Selection:
        """Return the selection of a micro-batch without samples."""
        return cls(torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device))


@dataclass(frozen=True)
class TeacherWeights:
    """The weights of the teachers on a micro-batch.

    Attributes:
        weights: One weight per teacher.
        factors: Further factors, one per teacher, of the divergence but not of the reported weight.
        selection: The teacher followed on this micro-batch, with `select_teacher`.
        selected_chunks: The step's denominator of the selected divergence; None: this micro-batch's.
    """

    weights: Sequence[Scalar]
    factors: Sequence[float]
    selection: Selection | None = None
    selected_chunks: Scalar | None = None

    def shared(self, shares: Sequence[float] | None) -> TeacherWeights:
        """Return the weights with each factor multiplied by its teacher's share of the samples; None: all are 1."""
        if shares is None:
            return self
        return replace(self, factors=[factor * share for factor, share in zip(self.factors, shares, strict=True)])


@dataclass(frozen=True)
class Denominators:
    """The denominators of a step's means; None: this micro-batch's own counts.

    Attributes:
        tokens: The step's next-token predictions.
        teachers: Per teacher the step's valid chunks, or its tokens.
    """

    tokens: Scalar | None
    teachers: Sequence[Scalar | None]


def evaluate_whole(
    batch: Mapping[str, Tensor],
    student_logits: Float[Tensor, "B T_s V_head"],
    teachers: Sequence[ComparedTeacher],
    *,
    trains_on_kd: bool,
    of_losses: Tensor | None = None,
) -> Values:
    """Evaluate every loss on the whole micro-batch at once, differentiable by the student's logits.

    Args:
        batch: Holds the student's own tokens.
        student_logits: The whole head, any floating dtype.
        teachers: The teachers it is compared with.
        trains_on_kd: True if gradients go through the divergences.
        of_losses: The gradient with which backward is going to be called for the cross-entropies, if it is known.
    """
    # One teacher at most takes the cross-entropy along: a second one would compute it for nothing.
    with_tokens = first_with_cross_entropy(teachers) if trains_on_kd else None
    divergences = []
    with nullcontext() if trains_on_kd else torch.no_grad():
        for teacher in teachers:
            logits, gathered = teacher.whole()
            both = teacher is with_tokens
            inputs = LossInput(teacher.pairing, student_logits, logits, teacher.columns, gathered, with_tokens=both)
            divergences.append(teacher.loss.compare(inputs))
    tokens = next((each.tokens for each in divergences if each.tokens is not None), None)
    if tokens is None:
        op = get_op("cross_entropy", student_logits.device)
        tokens = op(student_logits, next_token_targets(batch), upstream=of_losses)
    return Values(tuple(divergences), *tokens)


def first_with_cross_entropy(teachers: Sequence[ComparedTeacher]) -> ComparedTeacher | None:
    """Return the teacher whose loss computes the cross-entropy in the same pass, if there is one."""
    return next((teacher for teacher in teachers if teacher.loss.with_cross_entropy), None)


@dataclass(frozen=True)
class Objective:
    """The loss of a micro-batch as a function of `Values`; linear unless it is scaled dynamically.

    Attributes:
        config: The loss's settings.
        losses: One per teacher.
        batch: A padded or packed micro-batch with numbered teacher columns.
        denominators: The step's.
        weights: The teachers' on this micro-batch.
        token_kinds: The kinds of the student's tokens, for metrics by class of chunk; None: none are reported.
        observer: Called with everything that is reduced.
        kl_loss_weight: Weight of the divergence at this step; None: the setting. Dynamic scaling has its own.
    """

    config: LossConfig
    losses: Sequence[Loss]
    batch: Mapping[str, Tensor]
    denominators: Denominators
    weights: TeacherWeights
    token_kinds: Int[Tensor, " V"] | None
    observer: Callable[[Values], None] | None
    kl_loss_weight: float | None

    def __call__(self, values: Values) -> tuple[Float[Tensor, ""], Metrics]:
        """Return the loss, float32 (float64 for float64 logits), and its metrics, detached float32 scalars."""
        if self.observer is not None:
            # Before the importance weights: an observer sees the divergences themselves.
            self.observer(values)
        loss, summary = self._reduced(values)
        return loss, {name: detached(value, loss) for name, value in summary.items()}

    def _reduced(self, values: Values) -> tuple[Tensor, dict[str, Scalar]]:
        kd, metrics = self._divergence(values)
        ce = mean_over_tokens(self.batch, values.losses, values.hits, self.denominators.tokens)
        scale = self._kl_scale(kd, ce.loss)
        ce_scale = 1.0 if self.config.dynamic_loss_scaling else self.config.ce_loss_scale
        loss = scale * kd + ce_scale * ce.loss
        summary: dict[str, Scalar] = {
            "loss": loss,
            "ce_loss": ce.loss,
            "accuracy": ce.accuracy,
            "num_valid_samples": float(self.batch[schema.SAMPLE_MASK.name].shape[0]),
        }
        if self.losses:
            summary |= {"kl_loss": kd, "kl_loss_scale": scale}
        return loss, summary | metrics

    def upstream(self, at: Values) -> tuple[Tensor, ...]:
        """Return the gradient of the loss by each of `Values.differentiable`; of a linear loss it is the same anywhere.

        Args:
            at: Where it is taken, without graph.
        """
        # Through the reduction only: scalars and [B, P] values, nothing as large as logits.
        leaves = [x.requires_grad_() for x in at.differentiable]
        with torch.enable_grad():
            loss, _ = self._reduced(at)
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    def _divergence(self, values: Values) -> tuple[Tensor, dict[str, Scalar]]:
        """Return the weighted divergence and its metrics; 0 without teachers."""
        if not self.losses:
            return values.losses.new_zeros(()), {}
        weights = self.weights
        values, ratios = self._corrected(values)
        # With averaged logits there is one divergence for all teachers, and zip stops after it.
        triples = zip(self.losses, values.divergences, self.denominators.teachers, strict=False)
        terms = [loss.reduce(self.batch, divergence, denominator) for loss, divergence, denominator in triples]
        metrics: dict[str, Scalar] = {
            f"weight_t{loss.index}": weight for loss, weight in zip(self.losses, weights.weights, strict=True)
        }
        if self.config.teacher_aggregation == "averaged_logits":
            return terms[0].kd, metrics | terms[0].metrics
        for loss, term in zip(self.losses, terms, strict=True):
            metrics[f"kl_loss_t{loss.index}"] = term.kd
            metrics |= {f"{name}_t{loss.index}": value for name, value in term.metrics.items()}
        # Classes are of the corrected values, which is what trains.
        metrics |= ratios
        metrics |= self._by_class(values)
        if weights.selection is not None:
            metrics["num_selected_chunks"] = weights.selection.chunks
            return self._selected(values, weights.selection), metrics
        # Stacked: the sum has one order for any number of teachers, and one kernel.
        return torch.stack(list(self._weighted(terms))).sum(), metrics

    def _corrected(self, values: Values) -> tuple[Values, dict[str, Scalar]]:
        """Return the divergences weighed by `importance_cap`, and the mean weight of a chunk as metrics."""
        cap = self.config.importance_cap
        if cap is None:
            return values, {}
        divergences: list[Divergence] = []
        metrics: dict[str, Scalar] = {}
        pairs = zip(self.losses, values.divergences, self.denominators.teachers, strict=False)
        for loss, divergence, denominator in pairs:
            view = loss.chunks(self.batch)
            if view is not None:
                weight = chunk_weights(self.batch, values.losses.detach(), view, cap)
                divergence = divergence._replace(parts=tuple(part * weight for part in divergence.parts))
                step = view.valid.sum().float() if denominator is None else denominator
                metrics[f"importance_weight_t{loss.index}"] = partial_mean(masked_sum(weight, view.valid), step)
            divergences.append(divergence)
        return values._replace(divergences=tuple(divergences)), metrics

    @torch.no_grad()
    def _by_class(self, values: Values) -> dict[str, Tensor]:
        """Return the divergence and number of chunks by class, of every teacher with chunks."""
        metrics: dict[str, Tensor] = {}
        if self.token_kinds is not None:
            targets, rows = next_token_targets(self.batch), generated_tokens(self.batch)
            for loss, divergence in zip(self.losses, values.divergences, strict=True):
                if (view := loss.chunks(self.batch)) is not None:
                    members = class_members(targets, view, self.token_kinds)
                    generated = None if rows is None else generated_chunks(rows, view)
                    metrics |= class_metrics(torch.stack(divergence.parts).sum(0), members, loss.index, generated)
        return metrics

    def _weighted(self, terms: Sequence[TeacherTerm]) -> list[Tensor]:
        triples = zip(self.weights.weights, self.weights.factors, terms, strict=True)
        return [weight * factor * term.kd for weight, factor, term in triples]

    def _selected(self, values: Values, selection: Selection) -> Tensor:
        """Return the chosen teacher's divergence over the step's one denominator for all choices."""
        pairs = zip(self.losses, values.divergences, strict=True)
        step = self.weights.selected_chunks
        # All are reduced and one is gathered: choosing on the host would wait for the device in every micro-batch.
        kds = [loss.reduce(self.batch, divergence, step).kd for loss, divergence in pairs]
        return entry(torch.stack(kds), selection.chosen)

    def _kl_scale(self, kd: Tensor, ce: Tensor) -> Scalar:
        if not self.config.dynamic_loss_scaling:
            return self.config.kl_loss_weight if self.kl_loss_weight is None else self.kl_loss_weight
        # A ratio, not a term: without gradient, or the loss would learn to change it.
        kd, ce = kd.detach().abs(), ce.detach().abs()
        # Both branches of a where are computed: the inner one keeps 0 / 0 out of it.
        return torch.where(kd == 0, 1.0, ce / torch.where(kd == 0, 1.0, kd))


def entry(values: Float[Tensor, " n"], index: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """Return one entry of a vector; the index stays on the device."""
    return values.gather(0, index.unsqueeze(0)).squeeze(0)
