"""gold, H-KL and ULD: KL over common tokens plus sorted L1 over the rest; they differ in what counts as common."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from xtoken_core.config.loss import LossConfig, LossMode
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, LossInput, LossTeacher
from xtoken_core.losses.lazy_logits import cut
from xtoken_core.ops import get_op
from xtoken_core.ops.gold.reference import GoldCrossEntropyResult, GoldOptions, GoldResult, TokenPartition
from xtoken_core.projection.exact_map import exact_token_map


class GoldLoss(ChunkLoss):
    """gold: tokens of the strict exact-token map are common; sorted lists are cut at `uncommon_topk`."""

    mode: ClassVar[LossMode] = "gold"
    parts = 2
    part_names = ("kl_common", "l1_uncommon")
    with_cross_entropy = True
    relaxed: ClassVar[bool] = False

    def __init__(
        self, config: LossConfig, teacher: LossTeacher, *, index: int, student_vocab_size: int, device: torch.device
    ) -> None:
        """Split both vocabularies into common pairs and the rest, on the device; arguments as for `Loss`."""
        super().__init__(config, teacher, index=index, student_vocab_size=student_vocab_size, device=device)
        self.partition = self.split_vocabularies().to(device)

    def split_vocabularies(self) -> TokenPartition:
        """Return the common pairs and the uncommon ids of both vocabularies."""
        V_s = self.student_vocab_size
        indices, likelihoods = self.teacher.rows()  # [rows, k]; rows is the width of the head the file was built for
        padded = first_rows(indices, V_s, fill=-1), first_rows(likelihoods, V_s, fill=0)
        return TokenPartition(
            **exact_token_map(*padded, relaxed=self.relaxed, teacher_vocab_size=self.teacher.vocab_size)
        )

    @property
    def uncommon_topk(self) -> int | None:
        """Length at which the sorted lists of uncommon tokens are cut; None: not cut."""
        return self.config.uncommon_topk

    def evaluate(self, inputs: LossInput[Tensor]) -> Divergence:
        """Compute the common KL and the uncommon L1 of every chunk; with `with_tokens` the cross-entropy too.

        With both, one gradient is written.
        """
        config, pairing, student_logits = self.config, inputs.pairing, inputs.student_logits
        # The student's head stays uncut for the joint op: the cross-entropy is over all of its columns.
        compared = cut(inputs.teacher_logits, self.vocab_size), self.partition, *pairing.chunk_ids
        gold_options = GoldOptions(pairing.max_chunks, config.temperature, config.reverse_kl, self.uncommon_topk)
        if inputs.with_tokens:
            both: GoldCrossEntropyResult = get_op("gold_cross_entropy", student_logits.device)(
                student_logits, *compared, pairing.student_targets, gold_options
            )
            tokens = both.losses, both.hits
            return Divergence((both.kl_common, both.l1_uncommon), both.agrees, both.mass, tokens)
        student = cut(student_logits, self.student_vocab_size)
        result: GoldResult = get_op("gold", student.device)(student, *compared, gold_options)
        return Divergence((result.kl_common, result.l1_uncommon), result.agrees, result.mass)


class HKLLoss(GoldLoss):
    """H-KL: gold with the relaxed exact-token map, in which near matches are common too."""

    mode: ClassVar[LossMode] = "h_kl"
    relaxed = True


class ULDLoss(GoldLoss):
    """ULD: no token is common; the sorted lists are compared at full length."""

    mode: ClassVar[LossMode] = "uld"

    def split_vocabularies(self) -> TokenPartition:
        """Return a partition without common pairs."""
        none = torch.empty(0, dtype=torch.int64)
        return TokenPartition(none, none, torch.arange(self.student_vocab_size), torch.arange(self.teacher.vocab_size))

    @property
    def uncommon_topk(self) -> None:
        """Not cut."""
        return


def first_rows(x: Tensor, count: int, *, fill: int) -> Tensor:
    """Return the first `count` rows of a `[rows, k]` tensor; missing rows hold `fill`."""
    missing = count - x.shape[0]
    return x[:count] if missing <= 0 else torch.cat([x, x.new_full((missing, x.shape[1]), fill)])
