"""A student's and a teacher's tokenizer with the collator and the loss between them, for any training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor

from xtoken.parts import CrossTokenizerCollator, CrossTokenizerDistillationLoss, LossConfig, LossTeacher, TokenAligner
from xtoken_core import schema
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.chain.files import read_tables, write_tables
from xtoken_core.chain.tables import ChainTables
from xtoken_core.collate import Batch
from xtoken_core.config.loss import PAIR_KINDS
from xtoken_core.config.spec import padded_length
from xtoken_core.config.validation_errors import describe
from xtoken_core.errors import ConfigError, InputError, OutputError
from xtoken_core.projection.build import build_projection
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_core.projection.pair_cache import PairCache


class TokenizerPair:
    """Collator and loss of a student and a teacher with other tokenizers, whose chain tables the user's cache keeps.

    Attributes:
        tokenizer: The student's.
        aligner: Of both.
        collator: Makes aligned rows of texts.
        loss_fn: The loss, for several micro-batches a step.

    Args:
        student: Its tokenizer, of `transformers`.
        teacher: Likewise.
        context_length: Tokens of a text at most.
        device: Of the logits.
        special_tokens: Partners of special tokens of the student, in place of those of the same name.
        **loss: Settings of `[loss]`, such as `mode="alm"`.

    Raises:
        ConfigError: A setting is wrong.
        InputError: The tokenizers have nothing in common.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        *,
        context_length: int = 1024,
        device: torch.device | str = "cpu",
        special_tokens: Mapping[str, str] | None = None,
        **loss: Any,
    ) -> None:
        config = _checked(loss)
        if not isinstance(context_length, int) or context_length < 2:
            raise ConfigError(f"context_length = {context_length!r}: it is a number of tokens, at least 2")
        for side in (student, teacher):
            if not hasattr(side, "get_vocab"):
                raise ConfigError(f"{side!r:.60} is no tokenizer: load one by AutoTokenizer.from_pretrained")
        self.tokenizer = student
        self.aligner = TokenAligner(student, teacher, special_tokens)
        self.collator = CrossTokenizerCollator(
            student_tokenizer=student,
            teacher_tokenizer=teacher,
            aligner=self.aligner,
            ctx_length_student=context_length,
            ctx_length_teacher=context_length,
        )
        self.device = torch.device(device)
        pair = _loss_teacher(config, student, teacher, special_tokens)
        self.loss_fn = CrossTokenizerDistillationLoss(
            config, student_vocab_size=len(student), teachers=[pair], device=device
        )

    def collate(self, records: Sequence[str | Mapping[str, Any]]) -> dict[str, Tensor]:
        """Tokenize and align some texts.

        Args:
            records: Texts, or records with `text`, `prompt` and `completion`, or `messages`.

        Returns:
            Padded columns on the device: `input_ids` `[B, T_s]` for the student and `teacher_input_ids` `[B, T_t]` for
            the teacher, and what `loss` reads beside them. Rows are padded on the right, to the longest one's multiple
            of 8, so causal models need no mask.

        Raises:
            InputError: A record cannot be used.
        """
        return dict(aligned_rows(self.collator, records).to(self.device))

    def loss(
        self,
        batch: Mapping[str, Tensor],
        student_logits: Float[Tensor, "B T_s V_s"],
        teacher_logits: Float[Tensor, "B T_t V_t"],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, differentiable by the student's logits, and its metrics.

        Args:
            batch: The result of `collate`.
            student_logits: The student's, of `input_ids`.
            teacher_logits: The teacher's, of `teacher_input_ids`; no gradient is computed.
        """
        loss, metrics = self.loss_fn(batch, student_logits, [teacher_logits])
        return loss, dict(metrics)


def aligned_rows(collator: CrossTokenizerCollator, records: Sequence[str | Mapping[str, Any]]) -> Batch:
    """Tokenize and align some texts on the CPU, as `TokenizerPair.collate` does."""
    given = [{"text": record} if isinstance(record, str) else record for record in records]
    if isinstance(records, (str, Mapping)) or not given or not all(isinstance(record, Mapping) for record in given):
        raise InputError(f'a batch is a list of texts, or of records such as {{"text": "..."}}, not {records!r:.60}')
    batch = collator(given)
    lengths = {"student": schema.INPUT_LENGTHS, "teacher": schema.TEACHER_INPUT_LENGTHS}
    widths = {axis: padded_length(max(1, int(batch[field.name].max()))) for axis, field in lengths.items()}
    for field in (*schema.STUDENT_FIELDS, *schema.TEACHER_FIELDS, *schema.ALIGNMENT_FIELDS):
        if field.axis in widths:  # the collator pads to the context
            batch[field.name] = batch[field.name][:, : widths[field.axis]]
    return batch


def _checked(loss: Mapping[str, Any]) -> LossConfig:
    """Return the settings of a pair, without those that only a run can follow.

    Raises:
        ConfigError: A setting is wrong, or is none of a pair's.
    """
    try:
        config = LossConfig(**{"kl_loss_weight_end": None, **loss})
        config.check_topk([False], [False])
        config.check_given_text()
    except ValueError as error:
        why = describe(error, LossConfig) if isinstance(error, ValidationError) else error
        raise ConfigError(f"TokenizerPair: {why}") from error
    if config.kl_loss_weight_end is not None:
        raise ConfigError("kl_loss_weight_end needs the steps of a run: give loss_fn the kl_loss_weight of each step")
    if "custom" in config.modes:
        raise ConfigError('mode = "custom" names a class of a run (xtoken run --loss): call your own loss in your loop')
    return config


def _loss_teacher(
    config: LossConfig, student: Any, teacher: Any, special_tokens: Mapping[str, str] | None
) -> LossTeacher:
    """Build the mode's static data of the two tokenizers: chain tables, a projection or neither."""
    kind = PAIR_KINDS.get(config.mode_of(0))
    if kind == "chain":
        return LossTeacher(len(teacher), tables=_tables(student, teacher, special_tokens))
    if kind == "projection":
        projection = build_projection(student, teacher, special_tokens=special_tokens)
        return LossTeacher(len(teacher), projection.indices, projection.likelihoods)
    return LossTeacher(len(teacher), own_tokenizer=True)


def _tables(student: Any, teacher: Any, pairs: Mapping[str, str] | None) -> ChainTables:
    """Return the chain tables of two tokenizers from the user's cache, where they are kept for other processes."""
    prints = tokenizer_fingerprint(student, in_memory=True), tokenizer_fingerprint(teacher, in_memory=True)
    built = cache(lambda: as_tensors(build_tables(student, teacher, pairs)))
    try:
        kept = PairCache().file("chain", prints, lambda path: write_tables(built(), path, prints, pairs), pairs)
        return read_tables(kept)
    except (RuntimeError, OutputError):  # there is no home directory, or it cannot be written
        return built()
