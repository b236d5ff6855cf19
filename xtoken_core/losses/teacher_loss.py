"""One teacher's divergence in its mode, with everything static about it prepared once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import InputError
from xtoken_core.losses.alm import alm_loss
from xtoken_core.losses.common import ChunkView, LossTeacher, Scalar, TeacherTerm, cut
from xtoken_core.losses.exact_map import exact_token_map
from xtoken_core.losses.gold import gold_loss
from xtoken_core.losses.masks import keeps_exact_only, next_token_mask
from xtoken_core.losses.p_kl import p_kl_loss
from xtoken_core.losses.same_tokenizer import same_tokenizer_loss
from xtoken_core.losses.teachers import teacher_tokens
from xtoken_core.ops.gold import TokenPartition
from xtoken_core.ops.sparse_projection import ProjectionMatrix


class TeacherLoss:
    """A teacher's divergence as a function of a micro-batch."""

    def __init__(
        self,
        config: LossConfig,
        teacher: LossTeacher,
        *,
        place: int,
        index: int | None,
        student_vocab_size: int,
        device: torch.device,
    ) -> None:
        """Build the projection or the token map that the mode needs.

        Args:
            config: The loss's settings.
            teacher: The teacher's static data.
            place: Its place in the run's list.
            index: The index its columns carry.
            student_vocab_size: `V_s`.
            device: Where the logits will be.
        """
        self.config, self.teacher, self.place, self.index = config, teacher, place, index
        self.student_vocab_size = student_vocab_size
        self.mode = config.mode_of(place)
        self.projection: ProjectionMatrix | None = None
        self.partition: TokenPartition | None = None
        if teacher.indices is None or teacher.likelihoods is None:
            return
        if self.mode == "p_kl":
            self.projection = ProjectionMatrix.from_topk(
                teacher.indices,
                teacher.likelihoods,
                student_vocab_size=student_vocab_size,
                teacher_vocab_size=teacher.vocab_size,
            ).to(device)
        elif self.mode != "alm":
            self.partition = self._partition(teacher.indices, teacher.likelihoods).to(device)

    def __call__(
        self,
        batch: Mapping[str, Tensor],
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Float[Tensor, "B T_t V_m"],
        denominator: Scalar | None,
        *,
        targets: Int[Tensor, "B T_s"] | None = None,
    ) -> TeacherTerm:
        """The divergence of a micro-batch as its share of the step's mean; both heads uncut.

        With `targets`, which only a teacher that `compares_with_tokens` takes, the cross-entropy comes with it.
        """
        student = cut(student_logits, self.student_vocab_size)
        if self.teacher.same_tokenizer:
            teacher = cut(teacher_logits, self.student_vocab_size)
            return same_tokenizer_loss(
                batch, student, teacher, self.config, denominator, vocab_topk=self.config.vocab_topk
            )
        teacher = cut(teacher_logits, self.teacher.vocab_size)
        chunks = self._chunks(batch)
        if self.projection is not None:
            return p_kl_loss(
                student_logits, teacher, chunks, self.projection, self.config, denominator, targets=targets
            )
        if self.partition is not None:
            limit = None if self.mode == "uld" else self.config.uncommon_topk
            return gold_loss(student, teacher, chunks, self.partition, self.config, denominator, uncommon_topk=limit)
        ids, _ = teacher_tokens(batch, self.teacher, self.index)
        own = batch[schema.INPUT_IDS.name]
        return alm_loss(student, teacher, own, ids, chunks, self.config, denominator)

    @property
    def compares_with_tokens(self) -> bool:
        """Whether its divergence can be computed together with the cross-entropy."""
        return self.projection is not None

    def count(self, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """What a micro-batch adds to this teacher's denominator."""
        if self.teacher.same_tokenizer:
            return next_token_mask(batch[schema.TOKEN_MASK.name], batch[schema.SAMPLE_MASK.name]).sum()
        return self._chunks(batch).valid.sum().float()

    def check_head(self, teacher_logits: Tensor) -> None:
        """Refuse a head narrower than the vocabulary.

        Raises:
            InputError: It is.
        """
        needed = self.student_vocab_size if self.teacher.same_tokenizer else self.teacher.vocab_size
        if teacher_logits.shape[-1] < needed:
            raise InputError(
                f"teacher {self.place}: its head gives {teacher_logits.shape[-1]} logits, its tokenizer has {needed} "
                "tokens: this model and tokenizer do not belong together"
            )

    def _chunks(self, batch: Mapping[str, Tensor]) -> ChunkView:
        return ChunkView.of(batch, self.index, exact_only=keeps_exact_only(self.config, self.mode))

    def _partition(self, indices: Tensor, likelihoods: Tensor) -> TokenPartition:
        V_s, V_t = self.student_vocab_size, self.teacher.vocab_size
        if self.mode == "uld":
            none = torch.empty(0, dtype=torch.int64)
            return TokenPartition(none, none, torch.arange(V_s), torch.arange(V_t))
        rows = _rows(indices, V_s, -1), _rows(likelihoods, V_s, 0)
        return TokenPartition(**exact_token_map(*rows, relaxed=self.mode == "h_kl", teacher_vocab_size=V_t))


def _rows(x: Tensor, count: int, fill: int) -> Tensor:
    """The first `count` rows; missing ones are filled."""
    missing = count - x.shape[0]
    return x[:count] if missing <= 0 else torch.cat([x, x.new_full((missing, x.shape[1]), fill)])
