"""The chain divergence without some chunks of white space, to measure what a mask changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from xtoken_core.alignment.tables import token_table
from xtoken_core.chain import cached_tables
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_core.losses.chain_loss import ChainLoss
from xtoken_core.losses.chunk_classes import SPACES, token_kinds
from xtoken_core.losses.common import ChunkView, LossTeacher
from xtoken_core.losses.masks import kept_chunk_ids, next_token_targets
from xtoken_core.ops.chunk_mean.reference import chunk_sizes


class ChainWithoutWhiteSpace(ChainLoss):
    """Chain, where a chunk of white space alone has the value 0 and no gradient; the denominator counts it.

    Attributes:
        line_ends_only: Only chunks with a line end are left out.
    """

    mode = "custom"
    line_ends_only: ClassVar[bool] = False

    def __init__(
        self, config: LossConfig, teacher: LossTeacher, *, index: int, student_vocab_size: int, device: torch.device
    ) -> None:
        """Read or build the tables and find the white space; arguments as for `Loss`."""
        if teacher.tokenizers is None:
            raise ConfigError("this loss reads both tokenizers: run it by xtoken run --loss")
        tokenizers = teacher.tokenizers()
        teacher = replace(teacher, tables=cached_tables(*tokenizers))
        super().__init__(config, teacher, index=index, student_vocab_size=student_vocab_size, device=device)
        pieces = [bytes(piece) for piece in token_table(tokenizers[0]).pieces]
        self.spaces = (token_kinds(pieces) & SPACES).bool().to(device)  # [V_s]
        self.line_ends = torch.tensor([b"\n" in piece for piece in pieces], device=device)

    def chunks(self, batch: Mapping[str, Tensor]) -> ChunkView:
        """Return the teacher's alignment at predicting positions; chunks that are not compared have no position."""
        view = super().chunks(batch)
        ids, targets = view.student_chunk_id, next_token_targets(batch).clamp(max=len(self.spaces) - 1)

        def positions(kind: Tensor) -> Tensor:
            return chunk_sizes(torch.where(kind[targets], ids, -1), view.max_chunks)  # [B, P]

        masked = positions(self.spaces) == chunk_sizes(ids, view.max_chunks)
        if self.line_ends_only:
            masked &= positions(self.line_ends) > 0
        valid = view.valid & ~masked
        student, teacher = (kept_chunk_ids(each, valid) for each in (ids, view.teacher_chunk_id))
        return ChunkView(student, teacher, valid, valid)


class ChainWithoutLineEnds(ChainWithoutWhiteSpace):
    """Chain, where a chunk of white space that has a line end has the value 0 and no gradient."""

    line_ends_only = True
