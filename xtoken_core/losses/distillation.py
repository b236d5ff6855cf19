"""The one public loss: teachers, weights and reduction; each divergence is computed by a class of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.base import teacher_name
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses.base import Loss
from xtoken_core.losses.chunk_classes import class_means
from xtoken_core.losses.chunked_head import ChunkedHead
from xtoken_core.losses.common import LossTeacher, NumberedBatch, Scalar
from xtoken_core.losses.known_gradients import cross_entropy_alone
from xtoken_core.losses.lazy_logits import HeadProjection, Logits, MeanLogits, WholeLogits
from xtoken_core.losses.masks import student_tokens
from xtoken_core.losses.objective import (
    ComparedTeacher,
    Denominators,
    Metrics,
    Objective,
    Selection,
    TeacherWeights,
    Values,
    entry,
    evaluate_whole,
)
from xtoken_core.losses.registry import LOSSES
from xtoken_core.losses.same_tokenizer import SameTokenizerLoss
from xtoken_core.losses.teacher_scores import (
    lowest_index_of_minimum,
    masked_cross_entropy,
    teacher_score,
    vocabulary_factors,
)
from xtoken_core.losses.token_blocks import (
    BLOCK_ROWS,
    Extent,
    PackedExtent,
    TokenBlocks,
    blocks_of_packed_samples,
    blocks_of_samples,
    packed_blocks,
)
from xtoken_core.ops import get_op
from xtoken_core.ops.side_stream import join, second_stream

RATIOS = ("kl_loss_scale", "weight_", "overlap_ratio")
"""Prefixes of the metrics that are averaged over a step, not added."""


def wants_gradient_now(logits: Tensor) -> bool:
    """Return True unless there is no gradient, or it is in float16."""
    # float16 is left to backward: before a gradient scaler's factor, gradients are too small for it.
    return torch.is_grad_enabled() and logits.requires_grad and logits.dtype != torch.float16


class CrossTokenizerDistillationLoss:
    """`kl_loss_weight * KD + ce_loss_scale * CE`, or with dynamic scaling `stop_grad(|CE|/|KD|) * KD + CE`.

    `kl_loss_weight` is the step's, which a call is given where it is not the same at every step (`kl_loss_weight_end`).

    Every term is this micro-batch's part of the *step's* mean, given the step's denominators: the sum of the losses
    (and gradients) over all micro-batches and ranks of a step is the step's. Top-k K, dynamic scaling, dynamic
    teacher weights and the choice of a teacher are decided per micro-batch.

    Metrics, detached tensors without dimensions:

    - parts of the step's mean, to be **added** over micro-batches and ranks: `loss`, `kl_loss`, `ce_loss`,
      `accuracy`, and per teacher i `kl_loss_t{i}` (without its weight), `proj_accuracy_t{i}`, `chunk_mass_t{i}` (the
      teacher's mean mass per chunk), `unreachable_mass_t{i}` (P-KL: its mean mass on tokens that no row of the
      projection names), `kl_common_t{i}` and `l1_uncommon_t{i}` (gold), `chain_start_t{i}`,
      `chain_inner_t{i}` and `chain_end_t{i}` (all without `T^2`), `importance_weight_t{i}` (its mean over chunks);
    - counts, to be **added**: `num_valid_samples` (samples, masked or not), `num_valid_pairs_t{i}` (P-KL),
      `num_valid_chunks_t{i}` (other chunk losses), `num_valid_toks_t{i}` (same tokenizer),
      `num_selected_chunks` (`select_teacher`);
    - ratios of the micro-batch, to be **averaged**: `kl_loss_scale` and `weight_t{i}`, both as applied.

    With `token_kinds` also, to be **added**, the summed divergence `chunk_kl_sum_{class}_t{i}` of the classes of
    `chunk_classes`, in nats and without `T^2`, and their chunks `chunk_count_{class}_t{i}`.

    `combine_metrics` adds and averages them so. No call waits for the device.

    Attributes:
        observer: Called with the divergences and the cross-entropy of every chunk and token before they are reduced.
        shares: As of `among`.
    """

    def __init__(
        self,
        config: LossConfig,
        *,
        student_vocab_size: int,
        teachers: Sequence[LossTeacher],
        device: torch.device | str = "cpu",
        loss_classes: Mapping[str, type[Loss]] = LOSSES,
        token_kinds: Tensor | None = None,
    ) -> None:
        """Build every teacher's loss, with its projection or token map on the device.

        Args:
            config: The loss's settings.
            student_vocab_size: `V_s`, the size of the student's tokenizer; KD cuts a wider head to it.
            teachers: The teachers; without any, the loss is the cross-entropy.
            device: Device of the logits.
            loss_classes: The losses by mode.
            token_kinds: `chunk_classes.token_kinds` of the student's vocabulary, for metrics by class of chunk; None:
                they are left out.

        Raises:
            ConfigError: These settings are impossible with these teachers.
        """
        if not teachers and config.weighs_kd:
            name = "kl_loss_weight" if config.kl_loss_weight else "kl_loss_weight_end"
            raise ConfigError(f"loss.{name} weighs the divergence from a teacher: name one, or set it to 0")
        try:
            config.check_teachers([t.weight for t in teachers], [t.same_tokenizer for t in teachers])
        except ValueError as error:
            raise ConfigError(f"loss: {error}") from error
        if config.gradient_in_place and not getattr(get_op("p_kl_cross_entropy", device), "overwrites", False):
            raise ConfigError(f"loss: gradient_in_place needs the Triton backend, which is not available on {device}")
        self.config = config
        self.observer: Callable[[Values], None] | None = None
        self.shares: Sequence[float] | None = None
        self.token_kinds = None if token_kinds is None else token_kinds.to(device)
        self.student_vocab_size = student_vocab_size
        self.losses: list[Loss] = []
        for index, teacher in enumerate(teachers):
            kind = SameTokenizerLoss if teacher.same_tokenizer else loss_classes[config.mode_of(index)]
            own = kind(config, teacher, index=index, student_vocab_size=student_vocab_size, device=torch.device(device))
            own.name = teacher_name(index, len(teachers))
            self.losses.append(own)
        self.factors = vocabulary_factors(teachers) if config.normalize_teacher_by_vocab else [1.0] * len(teachers)

    def among(self, teachers: Sequence[int], shares: Sequence[float] | None = None) -> CrossTokenizerDistillationLoss:
        """Return the loss of a micro-batch that only these teachers compare, with their logits in this order.

        Args:
            teachers: Numbers of teachers, ascending.
            shares: Of each teacher of the run, the part of the step's tokens to learn that it compares: a sum weighs
                its mean by it. None: all teachers compare all of them.
        """
        if len(teachers) == len(self.losses) and shares is None:
            return self
        chosen = copy.copy(self)
        chosen.shares = None if shares is None else [shares[teacher] for teacher in teachers]
        chosen.losses = [self.losses[teacher] for teacher in teachers]
        chosen.factors = [self.factors[teacher] for teacher in teachers]
        return chosen

    def __call__(
        self,
        batch: Mapping[str, Tensor],
        student_logits: WholeLogits,
        teacher_logits: Sequence[Logits],
        *,
        global_valid_toks: Scalar | None = None,
        global_valid_chunks: Sequence[Scalar | None] | None = None,
        global_selected_chunks: Scalar | None = None,
        selection: Selection | None = None,
        blocks: TokenBlocks | None = None,
        kl_loss_weight: float | None = None,
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """Compute the loss of one padded or packed micro-batch.

        The gradient of a cross-entropy alone is computed with the loss. So are those of hidden states and head of a
        student's `HeadProjection`, block by block; dynamic scaling reads all blocks twice. Such a loss can be
        differentiated once. A teacher's `HeadProjection` beside a student's logits is multiplied out for the compared
        tokens only.

        Args:
            batch: The columns of `xtoken_core.schema` for this run's teachers; a single teacher's with or without its
                number. A packed one has its samples in one row (`B` is 1 but for the columns with one value per
                sample), chunks numbered over all of it, and the columns `packed_sample`.
            student_logits: The student's whole head, any floating dtype: `[B, T_s, V_head]`, or a `HeadProjection`.
            teacher_logits: Each teacher's `[B, T_t, V_m]` or `HeadProjection`, in order; `[B, T_s, V_m]` with the
                student's tokenizer.
            global_valid_toks: The step's next-token predictions; None: this micro-batch's.
            global_valid_chunks: Per teacher the step's valid chunks (unused for one with the student's tokenizer,
                which divides by `global_valid_toks`, unless `among` has shares); None: this micro-batch's.
            global_selected_chunks: `select_teacher` only: the step's chunks of the chosen teachers, the sum of
                `select`'s counts, for the loss; None: this micro-batch's. Each teacher's own metrics are over its own.
            selection: `select_teacher` only: the result of `select` for this micro-batch; None: it is computed again.
            blocks: For a `HeadProjection`: `token_blocks` of this batch; None: its result, on a GPU whole samples.
            kl_loss_weight: The step's, `LossConfig.kl_weight_at`; None: the first step's. Unused with dynamic scaling.

        Returns:
            The loss, float32 (float64 for float64 logits), and the metrics.

        Raises:
            InputError: A head is narrower than its vocabulary, or the number of teachers is wrong.
        """
        self._check_heads(student_logits, teacher_logits)
        batch = NumberedBatch(batch)
        frozen = [logits.detach() for logits in teacher_logits]
        denominators = self._denominators(global_valid_toks, global_valid_chunks)
        with torch.no_grad():
            weights = self._weights(batch, frozen, selection, global_selected_chunks).shared(self.shares)
            settings = self.config, self.losses, batch, denominators, weights, self.token_kinds
            objective = Objective(*settings, self.observer, kl_loss_weight)
            compared = self._compared(batch, frozen)
        trains_on_kd = self.trains_on_kd or bool(kl_loss_weight)
        if isinstance(student_logits, HeadProjection):
            given = blocks.to(student_logits.device) if blocks is not None else self._blocks(batch, frozen)
            head = ChunkedHead(batch, student_logits, compared, given, trains_on_kd=trains_on_kd)
            return head.loss(objective, linear=self._linear)
        if not trains_on_kd and self._linear and wants_gradient_now(student_logits):
            return cross_entropy_alone(batch, student_logits, compared, objective)
        return objective(evaluate_whole(batch, student_logits, compared, trains_on_kd=trains_on_kd))

    def values(self, batch: Mapping[str, Tensor], student_logits: Tensor, teacher_logits: Sequence[Logits]) -> Values:
        """Return the divergences and the cross-entropy before any mean, differentiable by the student's logits.

        Args:
            batch: As for the call.
            student_logits: `[B, T_s, V_head]`.
            teacher_logits: As for the call.

        Raises:
            InputError: As for the call.
        """
        self._check_heads(student_logits, teacher_logits)
        batch = schema.with_numbers(batch)
        compared = self._compared(batch, [logits.detach() for logits in teacher_logits])
        return evaluate_whole(batch, student_logits, compared, trains_on_kd=True)

    @property
    def trains_on_kd(self) -> bool:
        """True if the divergence has a gradient at some step; it is reported in any case."""
        return self.config.weighs_kd

    def token_blocks(
        self, batch: Mapping[str, Tensor], teacher_widths: Sequence[int], *, rows: int | None = None
    ) -> TokenBlocks:
        """Pack the needed positions into the blocks in which a student's head is multiplied; no chunk is split.

        Blocks are whole samples if some loss reads positions beside a chunk's own.

        Args:
            batch: As for the call, on the CPU.
            teacher_widths: Each teacher's `T_t`.
            rows: Maximum of student positions per block: memory grows with it, and larger matrix products are faster.
                None: 2,048, or half as many where a loss reads teachers' whole vocabularies.
        """
        batch = schema.with_numbers(batch)
        extents = self._extents(batch, teacher_widths)
        if any(loss.whole_samples for loss in self.losses):
            sample = batch.get(schema.STUDENT_SAMPLE.name)
            if sample is not None:
                return blocks_of_packed_samples(sample, self._packed_extents(batch), rows or self._block_rows)
            B, T = batch[schema.INPUT_IDS.name].shape
            return blocks_of_samples((B, T), extents, rows or self._block_rows, torch.device("cpu"))
        # Only positions with a weight, or in a chunk, are multiplied by the head at all.
        mask = student_tokens(batch).next_weights() > 0
        # [B, T]: the last position predicts none.
        needed = torch.cat([mask, mask.new_zeros(mask.shape[0], 1)], dim=1)
        return packed_blocks(needed, extents, rows or self._block_rows)

    @property
    def _linear(self) -> bool:
        """True if the gradient is known before the values; these two scale the divergence by values."""
        return not self.config.dynamic_loss_scaling and self.config.importance_cap is None

    @property
    def _block_rows(self) -> int:
        return BLOCK_ROWS if all(loss.compares_subset for loss in self.losses) else BLOCK_ROWS // 2

    @property
    def selects_teacher(self) -> bool:
        """True if every micro-batch follows one teacher: the step's denominator is then known by `select` only."""
        return self.config.teacher_aggregation == "select_teacher"

    def select(self, batch: Mapping[str, Tensor], teacher_logits: Sequence[Logits]) -> Selection:
        """Select the teacher that `select_teacher` follows on a micro-batch, without any student logits.

        The sum of the selections' chunks over the step's micro-batches and ranks is the `global_selected_chunks` of
        the call.

        Args:
            batch: As for the call.
            teacher_logits: As for the call.
        """
        batch = schema.with_numbers(batch)
        scores = [
            masked_cross_entropy(logits.detach(), loss.tokens(batch))
            for loss, logits in zip(self.losses, teacher_logits, strict=True)
        ]
        chosen = lowest_index_of_minimum(torch.stack(scores))
        return Selection(chosen, entry(torch.stack([loss.count(batch) for loss in self.losses]), chosen))

    def _compared(self, batch: Mapping[str, Tensor], teachers: Sequence[Logits]) -> list[ComparedTeacher]:
        """Return the teachers to compare with, each with its tokens."""
        if self.config.teacher_aggregation == "averaged_logits":
            # One comparison against the mean: all teachers share one tokenizer then, which the settings ensure.
            loss = self.losses[0]
            mean = MeanLogits(teachers, self._normalized_weights(), loss.vocab_size)
            return [ComparedTeacher(loss, mean, None, loss.pairing(batch))]
        device = batch[schema.INPUT_IDS.name].device
        # Columns are chosen beside masks and alignment; logits that are still to be computed belong to this stream.
        beside = all(isinstance(logits, Tensor) for logits in teachers)
        with second_stream(device) if beside else nullcontext():
            columns = [loss.columns(logits) for loss, logits in zip(self.losses, teachers, strict=True)]
        pairings = [loss.pairing(batch) for loss in self.losses]
        if beside:
            join(device)
        return [ComparedTeacher(*each) for each in zip(self.losses, teachers, columns, pairings, strict=True)]

    def _normalized_weights(self) -> list[float]:
        total = sum(loss.teacher.weight for loss in self.losses)
        return [loss.teacher.weight / total for loss in self.losses]

    def _weights(
        self,
        batch: Mapping[str, Tensor],
        teachers: Sequence[Logits],
        selection: Selection | None,
        selected_chunks: Scalar | None,
    ) -> TeacherWeights:
        """Return the teachers' weights on this micro-batch; they do not depend on the student."""
        kind = self.config.dynamic_teacher_weights
        if self.config.teacher_aggregation == "averaged_logits":
            return TeacherWeights(self._normalized_weights(), self.factors)
        if self.selects_teacher:
            selection = selection or self.select(batch, teachers)
            chosen = [(selection.chosen == index).float() for index in range(len(self.losses))]
            return TeacherWeights(chosen, self.factors, selection, selected_chunks)
        if kind is None:
            return TeacherWeights([loss.teacher.weight for loss in self.losses], self.factors)
        scores = [
            teacher_score(kind, logits, loss.tokens(batch)) * factor
            for loss, logits, factor in zip(self.losses, teachers, self.factors, strict=True)
        ]
        # On the device: the weights are tensors, so that no step waits for a score.
        weights = torch.softmax(torch.stack(scores), dim=0)
        return TeacherWeights(list(weights.unbind()), self.factors)

    def _blocks(self, batch: Mapping[str, Tensor], teachers: Sequence[Logits]) -> TokenBlocks:
        ids, widths = batch[schema.INPUT_IDS.name], [teacher.shape[1] for teacher in teachers]
        if ids.device.type == "cpu":
            return self.token_blocks(batch, widths)
        # Packing reads values of the batch, which on a GPU would wait for the device.
        return blocks_of_samples(
            (ids.shape[0], ids.shape[1]), self._extents(batch, widths), self._block_rows, ids.device
        )

    def _extents(self, batch: Mapping[str, Tensor], widths: Sequence[int]) -> list[Extent]:
        losses = self.losses[:1] if self.config.teacher_aggregation == "averaged_logits" else self.losses
        return [Extent(loss.chunks(batch), width) for loss, width in zip(losses, widths, strict=False)]

    def _packed_extents(self, batch: Mapping[str, Tensor]) -> list[PackedExtent]:
        return [
            PackedExtent(
                loss.chunks(batch),
                batch[schema.field_name(schema.TEACHER_SAMPLE, loss.index)],
                batch.get(schema.field_name(schema.PAIR_SAMPLE, loss.index)),
            )
            for loss in self.losses
        ]

    def _denominators(self, tokens: Scalar | None, chunks: Sequence[Scalar | None] | None) -> Denominators:
        given = chunks if chunks is not None else [None] * len(self.losses)
        if len(given) != len(self.losses):
            raise InputError(f"{len(given)} chunk denominators were given for {len(self.losses)} teachers")
        pairs = zip(self.losses, given, strict=True)
        # Averaged logits are one teacher's, of all samples.
        of_all = self.shares is None or self.config.teacher_aggregation == "averaged_logits"
        return Denominators(tokens, [tokens if loss.per_token and of_all else count for loss, count in pairs])

    def _check_heads(self, student_logits: WholeLogits, teacher_logits: Sequence[Logits]) -> None:
        if len(teacher_logits) != len(self.losses):
            raise InputError(f"{len(teacher_logits)} teachers' logits were given for {len(self.losses)} teachers")
        if student_logits.shape[-1] < self.student_vocab_size:
            raise InputError(
                f"the student's head gives {student_logits.shape[-1]} logits, its tokenizer has "
                f"{self.student_vocab_size} tokens: this model and tokenizer do not belong together"
            )
        for loss, logits in zip(self.losses, teacher_logits, strict=True):
            loss.check_head(logits)


def combine_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return a step's metrics from those of its micro-batches: means and counts are added, ratios averaged.

    Of a class of chunks the mean divergence is returned instead of its sum.

    Args:
        parts: The metrics of each micro-batch as numbers, all under the same step's denominators.
    """
    collected: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            collected.setdefault(name, []).append(float(value))
    combined = {
        # `fsum`: exact, so that metrics do not depend on the order of micro-batches or ranks.
        name: math.fsum(values) / len(values) if name.startswith(RATIOS) else math.fsum(values)
        for name, values in collected.items()
    }
    return class_means(combined)
