"""Chain: the KL of every chunk by the chain rule, over the pieces that each tokenizer itself cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig, LossMode
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import ChunkView, Divergence, LossInput, LossTeacher, Pairing, ReadTokens
from xtoken_core.losses.masks import generated_tokens, kept_chunk_ids, next_token_targets, predicted_ids
from xtoken_core.ops import get_op
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.events import PARTS, SideTokens
from xtoken_core.ops.chain.reference import ChainOptions, ChainResult, ChainSettings
from xtoken_core.ops.chain_topk.reference import ChainTopKResult, ChainTopKSettings
from xtoken_core.topk_logits import TopKLogits


class ChainLoss(ChunkLoss):
    """KL of a chunk as the sum of the KLs of its decisions: at its start, inside its tokens, after its last one.

    Rows that the student has generated are compared by the reverse KL or a generalised JSD where `reverse_kl` or `beta`
    is set; given text never is. The formula is in `ops.chain.reference`, the static data of the two tokenizers in
    `xtoken_core.chain`. Compared are correct chunks whose tokens are all predicted: none is the first of its sample.
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
        self.other_form = config.reverse_kl or config.beta is not None
        op: Any = get_op("chain", device)
        listed_op: Any = get_op("chain_topk", device)
        # Layouts of the tables are built here, once, not in the first step.
        op.prepare(self.tables)
        listed_op.prepare(self.tables)
        self.op, self.listed_op = op, listed_op
        self.widths = len(self.tables.student.root), len(self.tables.teacher.root)
        if self.widths[0] > student_vocab_size or self.widths[1] > teacher.vocab_size:
            raise ConfigError(
                f"the chain tables are those of {self.widths[0]} and {self.widths[1]} tokens, student and teacher "
                f"{index} have {student_vocab_size} and {teacher.vocab_size}: delete the tables, they are built again"
            )
        self.options = ChainOptions(**dict.fromkeys(config.chain_without, False))

    @property
    def with_cross_entropy(self) -> bool:  # type: ignore[override]  # here it depends on the backend
        """True if the backend computes the cross-entropy from the same reading of the logits."""
        return bool(self.op.reads_once)

    def chunks(self, batch: Mapping[str, Tensor]) -> ChunkView:
        """Return the teacher's alignment at predicting positions; chunks that are not compared have no position."""
        view = ChunkView.of(batch, self.index, self.config, "chain")
        # Chunks of masked samples lose their positions too, so that no kernel visits their nodes.
        student, teacher = (kept_chunk_ids(ids, view.valid) for ids in (view.student_chunk_id, view.teacher_chunk_id))
        return ChunkView(student, teacher, view.valid, view.valid)

    def pairing(self, batch: Mapping[str, Tensor]) -> Pairing:
        """Return the chunk of every position on both sides, and the tokens that positions have read."""
        chunks = self.view(batch)
        teacher_ids = self.tokens(batch).ids
        student, teacher = (
            batch[schema.field_name(field, self.index)] for field in (schema.STUDENT_CHUNK_ID, schema.TEACHER_CHUNK_ID)
        )
        generated = self._generated(batch)
        return Pairing(
            next_token_targets(batch),
            predicted_ids(teacher_ids),
            chunks.student_chunk_id,
            chunks.teacher_chunk_id,
            chunks.max_chunks,
            ReadTokens(batch[schema.INPUT_IDS.name], teacher_ids, student, teacher, generated),
        )

    def _generated(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return the positions `[B, T_s]` whose text is the student's own; None if all are compared alike.

        Raises:
            InputError: The batch does not say which rows are generated, and the form depends on it.
        """
        if not self.other_form:
            return None
        generated = generated_tokens(batch)
        if generated is None:
            raise InputError(
                'mode = "chain" with reverse_kl or beta takes generated text, and the batch has no column '
                f"{schema.WEIGHTS_VERSION.name}: add it (-1 for given text), or unset reverse_kl and beta"
            )
        return generated

    def evaluate(self, inputs: LossInput[Tensor]) -> Divergence:
        """Compute the parts of every chunk's KL; with `with_tokens` the cross-entropy too.

        Raises:
            ValueError: The pairing lacks the tokens that positions have read, or those that the teacher's predict.
        """
        pairing = inputs.pairing
        sides = _sides(pairing)
        settings = ChainSettings(
            pairing.max_chunks,
            self.options,
            self.config.temperature,
            with_cross_entropy=inputs.with_tokens,
            generated=self._form(pairing),
            overwrite=inputs.overwrite,
        )
        result: ChainResult = self.op(inputs.student_logits, inputs.teacher_logits, *sides, self.tables, settings)
        tokens = None if result.losses is None or result.hits is None else (result.losses, result.hits)
        return Divergence((result.start, result.inner, result.end), tokens=tokens)

    def evaluate_topk(self, inputs: LossInput[TopKLogits]) -> Divergence:
        """Compute the parts of every chunk's KL with a class of the tokens that the teacher does not list.

        The reported mass is the least fraction at a chunk's decisions.
        """
        pairing, student_logits, teacher = inputs.pairing, inputs.student_logits, inputs.teacher_logits
        sides, width = _sides(pairing), self.widths[1]
        # Every chunk's own tokens are compared, whether or not they are among the largest.
        listed = teacher.with_own(sides[1].predicted, sides[1].chunk >= 0)
        log_probs = listed.log_probs()
        # Tokens of the teacher that the tables do not have belong to the tail.
        tail = listed.log_rest.exp() + torch.where(listed.ids >= width, log_probs.exp(), 0.0).sum(-1)
        # The op for listed tokens may read the logits once for both losses; otherwise each has its own pass below.
        together = inputs.with_tokens and self.listed_op.reads_once
        settings = ChainTopKSettings(
            pairing.max_chunks,
            self.options,
            self.config.temperature,
            with_cross_entropy=together,
            generated=self._form(pairing),
        )
        given = log_probs, listed.ids, tail
        result: ChainTopKResult = self.listed_op(student_logits, *given, *sides, self.tables, settings)
        tokens = None if result.losses is None or result.hits is None else (result.losses, result.hits)
        if inputs.with_tokens and tokens is None:
            tokens = get_op("cross_entropy", student_logits.device)(student_logits, pairing.student_targets)
        return Divergence((result.start, result.inner, result.end), mass=result.kept, tokens=tokens)

    def _form(self, pairing: Pairing) -> Generated | None:
        """Return the form of the divergence on generated text; None if all text is compared by the forward KL."""
        generated = pairing.read.generated if pairing.read is not None else None
        return None if generated is None else Generated(generated, self.config.beta)


def _sides(pairing: Pairing) -> tuple[SideTokens, SideTokens]:
    """Return both sides' tokens.

    Raises:
        ValueError: The pairing lacks the tokens that positions have read, or those that the teacher's predict.
    """
    read, chunk_ids = pairing.read, pairing.chunk_ids
    if read is None or pairing.teacher_targets is None:
        raise ValueError("chain needs the tokens that positions have read and those that they predict")
    return (
        SideTokens(chunk_ids[0], pairing.student_targets, read.student_ids, read.student_chunk_id),
        SideTokens(chunk_ids[1], pairing.teacher_targets, read.teacher_ids, read.teacher_chunk_id),
    )
