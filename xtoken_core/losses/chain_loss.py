"""Chain: the KL of every chunk by the chain rule, over the pieces that each tokenizer itself cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig, LossMode
from xtoken_core.errors import ConfigError
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import ChunkView, Divergence, EvalOptions, LossTeacher, Pairing, ReadTokens
from xtoken_core.losses.masks import kept_chunk_ids, next_token_targets, predicted_ids
from xtoken_core.ops import get_op
from xtoken_core.ops.chain.events import PARTS, SideTokens
from xtoken_core.ops.chain.reference import ChainOptions, ChainResult, ChainSettings


class ChainLoss(ChunkLoss):
    """KL of a chunk as the sum of the KLs of its decisions: at its start, inside its tokens, after its last one.

    The formula is in `ops.chain.reference`, the static data of the two tokenizers in `xtoken_core.chain`. Compared are
    correct chunks whose tokens are all predicted: none is the first of its sample.
    """

    mode: ClassVar[LossMode] = "chain"
    parts = len(PARTS)
    part_names = tuple(f"chain_{name}" for name in PARTS)
    whole_samples = True

    def __init__(
        self, config: LossConfig, teacher: LossTeacher, *, index: int, student_vocab_size: int, device: torch.device
    ) -> None:
        """Move the tables to the device; arguments as for `Loss`.

        Raises:
            ConfigError: The teacher has no tables, or tables of larger vocabularies.
        """
        super().__init__(config, teacher, index=index, student_vocab_size=student_vocab_size, device=device)
        if teacher.tables is None:
            raise ConfigError('mode = "chain" takes the chain tables of student and teacher (LossTeacher.tables)')
        self.tables = teacher.tables.to(device)
        op: Any = get_op("chain", device)
        op.prepare(self.tables)
        self.op = op
        self.widths = len(self.tables.student.root), len(self.tables.teacher.root)
        if self.widths[0] > student_vocab_size or self.widths[1] > teacher.vocab_size:
            raise ConfigError(
                f"the chain tables are those of {self.widths[0]} and {self.widths[1]} tokens, student and teacher "
                f"{index} have {student_vocab_size} and {teacher.vocab_size}: delete the tables, they are built again"
            )
        self.options = ChainOptions(config.chain_conditioning, config.chain_end_terms, config.chain_bare_space)

    @property
    def with_cross_entropy(self) -> bool:  # type: ignore[override]  # here it depends on the backend
        """True if the backend computes the cross-entropy from the same reading of the logits."""
        return bool(self.op.reads_once)

    def chunks(self, batch: Mapping[str, Tensor]) -> ChunkView:
        """Return the teacher's alignment at predicting positions; chunks that are not compared have no position."""
        view = ChunkView.of(batch, self.index, self.config, "chain")
        student, teacher = (kept_chunk_ids(ids, view.valid) for ids in (view.student_chunk_id, view.teacher_chunk_id))
        return ChunkView(student, teacher, view.valid, view.valid)

    def pairing(self, batch: Mapping[str, Tensor]) -> Pairing:
        """Return the chunk of every position on both sides, and the tokens that positions have read."""
        chunks = self.chunks(batch)
        teacher_ids = self.tokens(batch).ids
        names = schema.STUDENT_CHUNK_ID, schema.TEACHER_CHUNK_ID
        read_chunks = (batch[schema.field_name(field, self.index)] for field in names)
        return Pairing(
            next_token_targets(batch),
            predicted_ids(teacher_ids),
            chunks.student_chunk_id,
            chunks.teacher_chunk_id,
            chunks.max_chunks,
            ReadTokens(batch[schema.INPUT_IDS.name], teacher_ids, *read_chunks),
        )

    def evaluate(
        self,
        pairing: Pairing,
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Float[Tensor, "B T_t W"],
        columns: Int[Tensor, " K"] | None,
        options: EvalOptions,
    ) -> Divergence:
        """Compute the parts of every chunk's KL; with `options.with_tokens` the cross-entropy too.

        Raises:
            ValueError: The pairing lacks the tokens that positions have read, or those that the teacher's predict.
        """
        read = pairing.read
        if read is None or pairing.teacher_targets is None:
            raise ValueError("chain needs the tokens that positions have read and those that they predict")
        chunk_ids = pairing.chunk_ids
        sides = (
            SideTokens(chunk_ids[0], pairing.student_targets, read.student_ids, read.student_chunk_id),
            SideTokens(chunk_ids[1], pairing.teacher_targets, read.teacher_ids, read.teacher_chunk_id),
        )
        settings = ChainSettings(
            pairing.max_chunks, self.options, self.config.temperature, with_cross_entropy=options.with_tokens
        )
        result: ChainResult = self.op(student_logits, teacher_logits, *sides, self.tables, settings)
        tokens = None if result.losses is None or result.hits is None else (result.losses, result.hits)
        return Divergence((result.start, result.inner, result.end), tokens=tokens)
