"""The one public loss: every teacher's divergence and the student's cross-entropy, weighed and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses.common import LossTeacher, Scalar, cut, detached
from xtoken_core.losses.cross_entropy import cross_entropy_loss, mean_over_tokens, next_token_targets
from xtoken_core.losses.same_tokenizer import same_tokenizer_loss
from xtoken_core.losses.teacher_loss import TeacherLoss
from xtoken_core.losses.teachers import (
    lowest_index_of_minimum,
    masked_cross_entropy,
    teacher_score,
    teacher_tokens,
    vocabulary_factors,
)
from xtoken_core.ops.numerics import upcast

Metrics = dict[str, Tensor]
Denominators = Sequence[Scalar | None]
Tokens = tuple[Tensor, Tensor]
"""The student's cross-entropy and hits at every position."""

RATIOS = ("kl_loss_scale", "weight_")
"""How the names of those metrics begin that do not add up over a step."""


class CrossTokenizerDistillationLoss:
    """`kl_loss_weight * KD + ce_loss_scale * CE`, or with dynamic scaling `stop_grad(|CE|/|KD|) * KD + CE`.

    Every part is this micro-batch's share of the *step's* mean, given the step's denominators: the sum of the losses
    (and gradients) over all micro-batches and ranks of a step is the step's. Top-k K, dynamic scaling, dynamic
    teacher weights and the choice of a teacher are decided per micro-batch.

    Metrics, detached tensors without dimensions:

    - shares of the step's mean, to be **added** over micro-batches and ranks: `loss`, `kl_loss`, `ce_loss`,
      `accuracy`, and per teacher i `kl_loss_t{i}` (without its weight), `proj_accuracy_t{i}`, `chunk_mass_t{i}` (the
      teacher's mean mass per chunk), `kl_common_t{i}` and `l1_uncommon_t{i}` (without `T^2`);
    - counts, to be **added**: `num_valid_samples` (rows, masked or not), `num_valid_pairs_t{i}` (P-KL),
      `num_valid_chunks_t{i}` (other chunk losses), `num_valid_toks_t{i}` (same tokenizer),
      `num_selected_chunks` (`select_teacher`);
    - ratios of the micro-batch, to be **averaged**: `kl_loss_scale` and `weight_t{i}`, both as applied.

    `combine_metrics` does just that. Nothing here waits for the device.
    """

    def __init__(
        self,
        config: LossConfig,
        *,
        student_vocab_size: int,
        teachers: Sequence[LossTeacher],
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare projections and token maps on the device.

        Args:
            config: The loss's settings.
            student_vocab_size: `V_s`, the size of the student's tokenizer; KD cuts a wider head to it.
            teachers: At least one.
            device: Where the logits will be.

        Raises:
            ConfigError: These settings are impossible with these teachers.
        """
        if not teachers:
            raise ConfigError("a distillation loss needs at least one teacher")
        try:
            config.check_teachers([t.weight for t in teachers], [t.same_tokenizer for t in teachers])
        except ValueError as error:
            raise ConfigError(f"loss: {error}") from error
        self.config = config
        self.student_vocab_size = student_vocab_size
        self.losses = [
            TeacherLoss(
                config,
                teacher,
                place=place,
                index=index,
                student_vocab_size=student_vocab_size,
                device=torch.device(device),
            )
            for place, (teacher, index) in enumerate(zip(teachers, schema.teacher_indices(len(teachers)), strict=True))
        ]
        self._factors = vocabulary_factors(teachers) if config.normalize_teacher_by_vocab else [1.0] * len(teachers)

    def __call__(
        self,
        batch: Mapping[str, Tensor],
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Sequence[Tensor],
        *,
        global_valid_toks: Scalar | None = None,
        global_valid_chunks: Denominators | None = None,
        global_selected_chunks: Scalar | None = None,
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss of one padded micro-batch.

        Args:
            batch: The columns of `xtoken_core.schema` for this run's teachers.
            student_logits: The student's whole head, any floating dtype.
            teacher_logits: Each teacher's `[B, T_t, V_m]`, in order; `[B, T_s, V_m]` with the student's tokenizer.
            global_valid_toks: The step's next-token predictions; None: this micro-batch's.
            global_valid_chunks: Per teacher the step's valid chunks (unused for one with the student's tokenizer,
                which divides by `global_valid_toks`); None: this micro-batch's.
            global_selected_chunks: `select_teacher` only: the step's chunks of the teachers chosen, the sum of what
                `select` gives; None: this micro-batch's.

        Returns:
            The loss, float32 (float64 for float64 logits), and the metrics.

        Raises:
            InputError: A head is narrower than its vocabulary, or the number of teachers is wrong.
        """
        self._check_heads(student_logits, teacher_logits)
        frozen = [logits.detach() for logits in teacher_logits]
        denominators = self._denominators(global_valid_toks, global_valid_chunks, global_selected_chunks)
        trains_on_kd = self.config.dynamic_loss_scaling or self.config.kl_loss_weight > 0
        with nullcontext() if trains_on_kd else torch.no_grad():
            kd, metrics, tokens = self._divergence(batch, student_logits, frozen, denominators)
        if trains_on_kd and tokens is not None:
            ce = mean_over_tokens(batch, *tokens, global_valid_toks)
        else:
            ce = cross_entropy_loss(batch, student_logits, global_valid_toks)
        scale = self._kl_scale(kd, ce.loss)
        ce_scale = 1.0 if self.config.dynamic_loss_scaling else self.config.ce_loss_scale
        loss = scale * kd + ce_scale * ce.loss
        summary: dict[str, Scalar] = {
            "loss": loss,
            "kl_loss": kd,
            "ce_loss": ce.loss,
            "kl_loss_scale": scale,
            "accuracy": ce.accuracy,
            "num_valid_samples": float(student_logits.shape[0]),
        }
        return loss, {name: detached(value, loss) for name, value in (summary | metrics).items()}

    def select(self, batch: Mapping[str, Tensor], teacher_logits: Sequence[Tensor]) -> tuple[Tensor, Float[Tensor, ""]]:
        """The teacher that `select_teacher` follows on a micro-batch, and what it adds to the step's denominator.

        It needs no student: the sum of the second value over the step's micro-batches and ranks is the
        `global_selected_chunks` of the call.

        Args:
            batch: As for the call.
            teacher_logits: As for the call.

        Returns:
            The teacher's place (int64, no dimensions; the lowest on ties) and its chunks (float32).
        """
        sample_mask = batch[schema.SAMPLE_MASK.name]
        losses = [
            masked_cross_entropy(logits.detach(), *teacher_tokens(batch, part.teacher, part.index), sample_mask)
            for part, logits in zip(self.losses, teacher_logits, strict=True)
        ]
        chosen = lowest_index_of_minimum(torch.stack(losses))
        return chosen, _at(torch.stack([part.count(batch) for part in self.losses]), chosen)

    def _divergence(
        self,
        batch: Mapping[str, Tensor],
        student_logits: Tensor,
        teacher_logits: Sequence[Tensor],
        denominators: Denominators,
    ) -> tuple[Tensor, dict[str, Scalar], Tokens | None]:
        """The weighed divergence, its metrics, and the cross-entropy where some teacher's kernel computes it too."""
        if self.config.teacher_aggregation == "averaged_logits":
            return *self._averaged(batch, student_logits, teacher_logits, denominators[0]), None
        with_tokens = next((part for part in self.losses if part.compares_with_tokens), None)
        targets = next_token_targets(batch)
        terms = [
            part(batch, student_logits, logits, denominator, targets=targets if part is with_tokens else None)
            for part, logits, denominator in zip(self.losses, teacher_logits, denominators, strict=True)
        ]
        tokens = next((term.tokens for term in terms if term.tokens is not None), None)
        metrics: dict[str, Scalar] = {}
        for place, term in enumerate(terms):
            metrics[f"kl_loss_t{place}"] = term.kd
            metrics |= {f"{name}_t{place}": value for name, value in term.metrics.items()}
        if self.config.teacher_aggregation == "select_teacher":
            chosen, count = self.select(batch, teacher_logits)
            weights: list[Scalar] = [(chosen == place).float() for place in range(len(terms))]
            kd = _at(torch.stack([term.kd for term in terms]), chosen)
            metrics["num_selected_chunks"] = count
        else:
            weights = self._weights(batch, teacher_logits)
            parts = zip(weights, self._factors, terms, strict=True)
            kd = torch.stack([weight * factor * term.kd for weight, factor, term in parts]).sum()
        return kd, metrics | {f"weight_t{place}": weight for place, weight in enumerate(weights)}, tokens

    def _weights(self, batch: Mapping[str, Tensor], teacher_logits: Sequence[Tensor]) -> list[Scalar]:
        kind = self.config.dynamic_teacher_weights
        if kind is None:
            return [part.teacher.weight for part in self.losses]
        sample_mask = batch[schema.SAMPLE_MASK.name]
        scores = [
            teacher_score(kind, logits, *teacher_tokens(batch, part.teacher, part.index), sample_mask) * factor
            for part, logits, factor in zip(self.losses, teacher_logits, self._factors, strict=True)
        ]
        return list(torch.softmax(self.config.dynamic_weight_alpha * torch.stack(scores), dim=0).unbind())

    def _averaged(
        self,
        batch: Mapping[str, Tensor],
        student_logits: Tensor,
        teacher_logits: Sequence[Tensor],
        denominator: Scalar | None,
    ) -> tuple[Tensor, dict[str, Scalar]]:
        V_s = self.student_vocab_size
        total = sum(part.teacher.weight for part in self.losses)
        weights = [part.teacher.weight / total for part in self.losses]
        mean = torch.zeros_like(upcast(cut(teacher_logits[0], V_s)))
        for weight, logits in zip(weights, teacher_logits, strict=True):
            mean = mean + weight * upcast(cut(logits, V_s))
        term = same_tokenizer_loss(batch, cut(student_logits, V_s), mean, self.config, denominator, vocab_topk=None)
        metrics: dict[str, Scalar] = dict(term.metrics)
        return term.kd, metrics | {f"weight_t{place}": weight for place, weight in enumerate(weights)}

    def _denominators(self, toks: Scalar | None, chunks: Denominators | None, selected: Scalar | None) -> Denominators:
        if self.config.teacher_aggregation == "select_teacher":
            return [selected] * len(self.losses)
        given = chunks if chunks is not None else [None] * len(self.losses)
        if len(given) != len(self.losses):
            raise InputError(f"{len(given)} chunk denominators were given for {len(self.losses)} teachers")
        pairs = zip(self.losses, given, strict=True)
        return [toks if part.teacher.same_tokenizer else count for part, count in pairs]

    def _kl_scale(self, kd: Tensor, ce: Tensor) -> Scalar:
        if not self.config.dynamic_loss_scaling:
            return self.config.kl_loss_weight
        kd, ce = kd.detach().abs(), ce.detach().abs()
        scale = torch.where(kd == 0, 1.0, ce / torch.where(kd == 0, 1.0, kd))
        cap = self.config.dynamic_loss_scale_cap
        return scale if cap is None else scale.clamp(max=cap)

    def _check_heads(self, student_logits: Tensor, teacher_logits: Sequence[Tensor]) -> None:
        if len(teacher_logits) != len(self.losses):
            raise InputError(f"{len(teacher_logits)} teachers' logits were given for {len(self.losses)} teachers")
        if student_logits.shape[-1] < self.student_vocab_size:
            raise InputError(
                f"the student's head gives {student_logits.shape[-1]} logits, its tokenizer has "
                f"{self.student_vocab_size} tokens: this model and tokenizer do not belong together"
            )
        for part, logits in zip(self.losses, teacher_logits, strict=True):
            part.check_head(logits)


def combine_metrics(parts: Iterable[Mapping[str, Tensor]]) -> Metrics:
    """A step's metrics from its micro-batches': shares and counts are added, ratios averaged.

    Args:
        parts: The metrics of each micro-batch, all under the same step's denominators.
    """
    collected: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.items():
            collected.setdefault(name, []).append(value)
    stacked = {name: torch.stack(values) for name, values in collected.items()}
    return {name: v.mean() if name.startswith(RATIOS) else v.sum() for name, v in stacked.items()}


def _at(values: Tensor, place: Tensor) -> Tensor:
    return values.gather(0, place.unsqueeze(0)).squeeze(0)
