"""The one public loss: every teacher's divergence and the student's cross-entropy, weighed and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses.chunked_head import Blockwise
from xtoken_core.losses.common import LossTeacher, Scalar
from xtoken_core.losses.comparison import ComparedTeacher, compare
from xtoken_core.losses.lazy_logits import HeadProjection, Logits, MeanLogits
from xtoken_core.losses.masks import next_token_mask
from xtoken_core.losses.teacher_loss import TeacherLoss
from xtoken_core.losses.teachers import (
    lowest_index_of_minimum,
    masked_cross_entropy,
    teacher_score,
    teacher_tokens,
    vocabulary_factors,
)
from xtoken_core.losses.token_blocks import BLOCK_ROWS, Extent, TokenBlocks, blocks_of_samples, packed_blocks
from xtoken_core.losses.total import Metrics, Selection, Shares, Total, at
from xtoken_core.ops import get_op

Denominators = Sequence[Scalar | None]

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
        if config.gradient_in_place and not getattr(get_op("p_kl_cross_entropy", device), "overwrites", False):
            raise ConfigError(
                f"loss: gradient_in_place needs the Triton backend of p_kl_cross_entropy, unused on {device}: unset it"
            )
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
        self.factors = vocabulary_factors(teachers) if config.normalize_teacher_by_vocab else [1.0] * len(teachers)

    def __call__(
        self,
        batch: Mapping[str, Tensor],
        student_logits: Logits,
        teacher_logits: Sequence[Logits],
        *,
        global_valid_toks: Scalar | None = None,
        global_valid_chunks: Denominators | None = None,
        global_selected_chunks: Scalar | None = None,
        selection: Selection | None = None,
        blocks: TokenBlocks | None = None,
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss of one padded micro-batch.

        A student given as a `HeadProjection` is never multiplied out as a whole: blocks of its positions are, one
        after the other, and the gradients of its hidden states and head are computed with the loss, so that it can be
        differentiated once. Dynamic scaling needs both losses before either's gradient and goes through all blocks
        twice. A teacher given so beside a student's logits is multiplied out at the tokens it compares.

        Args:
            batch: The columns of `xtoken_core.schema` for this run's teachers.
            student_logits: The student's whole head, any floating dtype: `[B, T_s, V_head]`, or what gives it.
            teacher_logits: Each teacher's `[B, T_t, V_m]` or what gives it, in order; `[B, T_s, V_m]` with the
                student's tokenizer.
            global_valid_toks: The step's next-token predictions; None: this micro-batch's.
            global_valid_chunks: Per teacher the step's valid chunks (unused for one with the student's tokenizer,
                which divides by `global_valid_toks`); None: this micro-batch's.
            global_selected_chunks: `select_teacher` only: the step's chunks of the teachers chosen, the sum of what
                `select` gives, for the loss; None: this micro-batch's. Each teacher's own metrics are over its own.
            selection: `select_teacher` only: what `select` has given for this micro-batch; None: it is asked again.
            blocks: For a `HeadProjection`: what `token_blocks` says about this batch. None: that is found out for a
                batch on the CPU, elsewhere blocks are whole samples.

        Returns:
            The loss, float32 (float64 for float64 logits), and the metrics.

        Raises:
            InputError: A head is narrower than its vocabulary, or the number of teachers is wrong.
        """
        self._check_heads(student_logits, teacher_logits)
        batch = schema.with_numbers(batch)
        frozen = [logits.detach() for logits in teacher_logits]
        denominators = self._denominators(global_valid_toks, global_valid_chunks)
        with torch.no_grad():
            shares = self._shares(batch, frozen, selection)._replace(selected_chunks=global_selected_chunks)
            total = Total(self.config, self.losses, self.factors, batch, denominators, global_valid_toks, shares)
            compared = self._compared(batch, frozen)
        if isinstance(student_logits, HeadProjection):
            given = blocks.to(student_logits.device) if blocks is not None else self._blocks(batch, frozen)
            blockwise = Blockwise(batch, student_logits, compared, given, trains_on_kd=self.trains_on_kd)
            return blockwise.loss(total, linear=not self.config.dynamic_loss_scaling)
        return total(compare(batch, student_logits, compared, trains_on_kd=self.trains_on_kd))

    @property
    def trains_on_kd(self) -> bool:
        """Whether the divergence has a gradient; it is reported in any case."""
        return self.config.dynamic_loss_scaling or self.config.kl_loss_weight > 0

    def token_blocks(
        self, batch: Mapping[str, Tensor], teacher_widths: Sequence[int], *, rows: int | None = None
    ) -> TokenBlocks:
        """The blocks in which a student's head is multiplied out: no chunk is cut, no position is computed in vain.

        Args:
            batch: As for the call, on the CPU.
            teacher_widths: Each teacher's `T_t`.
            rows: Most student positions of a block: memory grows with it, and larger matrix products are faster. None:
                2,048, or half as many where a mode reads teachers' whole vocabularies.
        """
        batch = schema.with_numbers(batch)
        mask = next_token_mask(batch[schema.TOKEN_MASK.name], batch[schema.SAMPLE_MASK.name]) > 0
        needed = torch.cat([mask, mask.new_zeros(mask.shape[0], 1)], dim=1)
        return packed_blocks(needed, self._extents(batch, teacher_widths), rows or self._block_rows)

    @property
    def _block_rows(self) -> int:
        return BLOCK_ROWS if all(part.compares_some for part in self.losses) else BLOCK_ROWS // 2

    @property
    def selects_teacher(self) -> bool:
        """Whether every micro-batch follows one teacher: then a step's denominator is known by `select` only."""
        return self.config.teacher_aggregation == "select_teacher"

    def select(self, batch: Mapping[str, Tensor], teacher_logits: Sequence[Logits]) -> Selection:
        """The teacher that `select_teacher` follows on a micro-batch, and what it adds to the step's denominator.

        It needs no student: the sum of the chunks over the step's micro-batches and ranks is the
        `global_selected_chunks` of the call.

        Args:
            batch: As for the call.
            teacher_logits: As for the call.
        """
        batch = schema.with_numbers(batch)
        sample_mask = batch[schema.SAMPLE_MASK.name]
        losses = [
            masked_cross_entropy(logits.detach(), *teacher_tokens(batch, part.teacher, part.index), sample_mask)
            for part, logits in zip(self.losses, teacher_logits, strict=True)
        ]
        chosen = lowest_index_of_minimum(torch.stack(losses))
        return Selection(chosen, at(torch.stack([part.count(batch) for part in self.losses]), chosen))

    def _compared(self, batch: Mapping[str, Tensor], teachers: Sequence[Logits]) -> list[ComparedTeacher]:
        """What the student is compared with, each with its tokens."""
        if self.config.teacher_aggregation == "averaged_logits":
            part = self.losses[0]
            mean = MeanLogits(teachers, list(self._static_shares()), part.vocab_size)
            return [ComparedTeacher(part, mean, None, part.pairing(batch))]
        return [
            ComparedTeacher(part, logits, part.columns(logits), part.pairing(batch))
            for part, logits in zip(self.losses, teachers, strict=True)
        ]

    def _static_shares(self) -> Iterable[float]:
        total = sum(part.teacher.weight for part in self.losses)
        return (part.teacher.weight / total for part in self.losses)

    def _shares(self, batch: Mapping[str, Tensor], teachers: Sequence[Logits], selection: Selection | None) -> Shares:
        """How much each teacher counts on this micro-batch: the student has no say in it."""
        kind = self.config.dynamic_teacher_weights
        if self.config.teacher_aggregation == "averaged_logits":
            return Shares(list(self._static_shares()))
        if self.selects_teacher:
            found = selection or self.select(batch, teachers)
            return Shares([(found.chosen == place).float() for place in range(len(self.losses))], found)
        if kind is None:
            return Shares([part.teacher.weight for part in self.losses])
        sample_mask = batch[schema.SAMPLE_MASK.name]
        scores = [
            teacher_score(kind, logits, *teacher_tokens(batch, part.teacher, part.index), sample_mask) * factor
            for part, logits, factor in zip(self.losses, teachers, self.factors, strict=True)
        ]
        return Shares(list(torch.softmax(self.config.dynamic_weight_alpha * torch.stack(scores), dim=0).unbind()))

    def _blocks(self, batch: Mapping[str, Tensor], teachers: Sequence[Logits]) -> TokenBlocks:
        ids, widths = batch[schema.INPUT_IDS.name], [teacher.shape[1] for teacher in teachers]
        if ids.device.type == "cpu":
            return self.token_blocks(batch, widths)
        return blocks_of_samples(
            (ids.shape[0], ids.shape[1]), self._extents(batch, widths), self._block_rows, ids.device
        )

    def _extents(self, batch: Mapping[str, Tensor], widths: Sequence[int]) -> list[Extent]:
        parts = self.losses[:1] if self.config.teacher_aggregation == "averaged_logits" else self.losses
        return [
            Extent(None if part.teacher.same_tokenizer else part.chunks(batch), width)
            for part, width in zip(parts, widths, strict=False)
        ]

    def _denominators(self, toks: Scalar | None, chunks: Denominators | None) -> Denominators:
        given = chunks if chunks is not None else [None] * len(self.losses)
        if len(given) != len(self.losses):
            raise InputError(f"{len(given)} chunk denominators were given for {len(self.losses)} teachers")
        pairs = zip(self.losses, given, strict=True)
        return [toks if part.teacher.same_tokenizer else count for part, count in pairs]

    def _check_heads(self, student_logits: Logits, teacher_logits: Sequence[Logits]) -> None:
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
