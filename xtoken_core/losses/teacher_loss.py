"""One teacher's divergence in its mode, with everything static about it prepared once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import InputError
from xtoken_core.losses.alm import alm_divergence, alm_term
from xtoken_core.losses.common import ChunkView, Divergence, LossTeacher, Pairing, Scalar, TeacherTerm, cut
from xtoken_core.losses.cross_entropy import next_token_targets, predicted_ids
from xtoken_core.losses.gold import gold_divergence, gold_term
from xtoken_core.losses.lazy_logits import Logits
from xtoken_core.losses.masks import keeps_exact_only, next_token_mask
from xtoken_core.losses.p_kl import p_kl_divergence, p_kl_term
from xtoken_core.losses.same_tokenizer import same_tokenizer_divergence, same_tokenizer_term
from xtoken_core.losses.teachers import teacher_tokens
from xtoken_core.ops import get_op
from xtoken_core.ops.gold import TokenPartition
from xtoken_core.ops.sparse_projection import ProjectionMatrix
from xtoken_core.projection.exact_map import exact_token_map


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

    def columns(self, teacher: Logits) -> Int[Tensor, " K"] | None:
        """The tokens that its mode compares; None: the mode has no such choice, or takes all.

        Args:
            teacher: Its logits of the whole micro-batch, padding included.
        """
        k = self.config.vocab_topk
        if self.projection is None and not (self.teacher.same_tokenizer and k is not None):
            return None
        size = self.vocab_size
        k = size if k is None else min(k, size)
        if isinstance(teacher, Tensor):
            return self._select(cut(teacher, size), k)
        return self._select(teacher.column_maximum(size), k) if k < size else torch.arange(size, device=teacher.device)

    @property
    def vocab_size(self) -> int:
        """How much of the teacher's head is compared."""
        return self.student_vocab_size if self.teacher.same_tokenizer else self.teacher.vocab_size

    @property
    def compares_some(self) -> bool:
        """Whether a few of the teacher's tokens are compared, not its whole vocabulary."""
        k = self.config.vocab_topk
        return (self.projection is not None or self.teacher.same_tokenizer) and k is not None and k < self.vocab_size

    @property
    def parts(self) -> int:
        """How many tensors its divergence is added up from."""
        return 2 if self.partition is not None else 1

    def compare(
        self,
        pairing: Pairing,
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Float[Tensor, "B T_t V_m"],
        columns: Int[Tensor, " K"] | None,
        *,
        gathered: bool = False,
        overwrite: bool = False,
        with_tokens: bool = False,
    ) -> Divergence:
        """The divergence of every chunk or position, with a gradient for the student; both heads uncut.

        Args:
            pairing: What is compared with what.
            student_logits: Any floating dtype.
            teacher_logits: Likewise; of `columns` alone where `gathered`.
            columns: As `columns` gives them.
            gathered: See there.
            overwrite: Whether the student's logits may be lost to their gradient.
            with_tokens: Whether the cross-entropy comes with it, for one that `compares_with_tokens`.
        """
        config = self.config
        teacher = teacher_logits if gathered else cut(teacher_logits, self.vocab_size)
        if self.projection is not None and columns is not None:
            flags = {"gathered": gathered, "overwrite": overwrite, "with_tokens": with_tokens}
            return p_kl_divergence(student_logits, teacher, pairing, self.projection, columns, config, **flags)
        student = cut(student_logits, self.student_vocab_size)
        if self.teacher.same_tokenizer:
            return same_tokenizer_divergence(student, teacher, columns, config, gathered=gathered)
        if self.partition is not None:
            limit = None if self.mode == "uld" else config.uncommon_topk
            return gold_divergence(student, teacher, pairing, self.partition, config, uncommon_topk=limit)
        return alm_divergence(student, teacher, pairing, config)

    def term(self, batch: Mapping[str, Tensor], divergence: Divergence, denominator: Scalar | None) -> TeacherTerm:
        """A micro-batch's divergence as its share of the step's mean."""
        if self.teacher.same_tokenizer:
            return same_tokenizer_term(batch, divergence, self.config, denominator)
        chunks = self.chunks(batch)
        if self.projection is not None:
            return p_kl_term(divergence, chunks, self.config, denominator)
        if self.partition is not None:
            return gold_term(divergence, chunks, self.config, denominator)
        return alm_term(divergence, chunks, denominator)

    def pairing(self, batch: Mapping[str, Tensor]) -> Pairing:
        """What of a whole micro-batch is compared with what."""
        targets = next_token_targets(batch)
        if self.teacher.same_tokenizer:
            return Pairing(targets)
        chunks, of_teacher = self.chunks(batch), None
        if self.mode == "alm":
            of_teacher = predicted_ids(teacher_tokens(batch, self.teacher, self.index)[0])
        return Pairing(targets, of_teacher, chunks.student_chunk_id, chunks.teacher_chunk_id, chunks.max_chunks)

    @property
    def compares_with_tokens(self) -> bool:
        """Whether its divergence can be computed together with the cross-entropy."""
        return self.projection is not None

    def count(self, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """What a micro-batch adds to this teacher's denominator."""
        if self.teacher.same_tokenizer:
            return next_token_mask(batch[schema.TOKEN_MASK.name], batch[schema.SAMPLE_MASK.name]).sum()
        return self.chunks(batch).valid.sum().float()

    def check_head(self, teacher_logits: Logits) -> None:
        """Refuse a head narrower than the vocabulary.

        Raises:
            InputError: It is.
        """
        if teacher_logits.shape[-1] < self.vocab_size:
            raise InputError(
                f"teacher {self.place}: its head gives {teacher_logits.shape[-1]} logits, its tokenizer has "
                f"{self.vocab_size} tokens: this model and tokenizer do not belong together"
            )
        maxima = None if isinstance(teacher_logits, Tensor) else teacher_logits.column_maxima
        if maxima is not None and maxima.shape[-1] < self.vocab_size:
            raise InputError(
                f"teacher {self.place}: column maxima of {maxima.shape[-1]} tokens were given, its tokenizer has "
                f"{self.vocab_size}"
            )

    def _select(self, rows: Tensor, k: int) -> Tensor:
        ids: Tensor = get_op("select_topk_columns", rows.device)(rows, k)
        return ids

    def chunks(self, batch: Mapping[str, Tensor]) -> ChunkView:
        """Its alignment in a micro-batch."""
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
