"""A public loss of gold's kind for the serial loop: TRL's GOLD, divergence on shared tokens, sorted L1 on the rest.

It is what one has today without this package. It is not the same loss: it compares probabilities of chunks, not means
of log-probabilities, and sorts all that is not shared.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.end_to_end.assets import Assets
from xtoken_core import schema
from xtoken_core.alignment import token_table

IGNORED = -100
CE_WEIGHT = 0.1


class PublicGold:
    """TRL's loss, called as the package's own is by the serial loop.

    Args:
        assets: Whose tokenizers.
        device: Where it computes.

    Raises:
        SystemExit: TRL is not installed.
    """

    def __init__(self, assets: Assets, device: torch.device) -> None:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        try:
            from trl.experimental.gold.gold_config import GOLDConfig
            from trl.experimental.gold.gold_trainer import ULDLoss
        except ImportError as error:
            raise SystemExit(f"{error}: this loop has TRL's loss: pip install -e '.[bench]'") from error
        settings = {field.name: field.default for field in dataclasses.fields(GOLDConfig)}
        settings |= {"uld_use_hybrid_loss": True, "uld_crossentropy_weight": CE_WEIGHT}
        ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (assets.student, assets.teacher))
        self._loss = ULDLoss(
            SimpleNamespace(**settings), student_tokenizer=ours, teacher_tokenizer=theirs, device=device
        )
        self._lengths = [torch.from_numpy(token_table(t).pool.lengths).to(device) for t in (ours, theirs)]

    def __call__(
        self, batch: Mapping[str, Tensor], logits: Float[Tensor, "B T V"], signals: list[Float[Tensor, "B T_t V_t"]]
    ) -> tuple[Float[Tensor, ""], None]:
        """Compute the loss of a collated batch; there are no metrics."""
        ids = [batch[name] for name in (schema.INPUT_IDS.name, schema.TEACHER_INPUT_IDS.name)]
        kept = [batch[name] for name in (schema.INPUT_LENGTHS.name, schema.TEACHER_INPUT_LENGTHS.name)]
        labels = [_labels(tokens, length) for tokens, length in zip(ids, kept, strict=True)]
        offsets = [_offsets(tokens, lengths) for tokens, lengths in zip(ids, self._lengths, strict=True)]
        value: Tensor = self._loss(
            logits, signals[0], *labels, *ids, student_byte_offsets=offsets[0], teacher_byte_offsets=offsets[1]
        )
        return value.reshape(()), None


def _labels(tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Int[Tensor, "B T"]:
    """Return the tokens, without padding."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(places >= lengths[:, None], IGNORED)


def _offsets(tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " V"]) -> Int[Tensor, "B T 2"]:
    """Return the bytes of the text that each token covers."""
    ends = lengths[tokens].cumsum(dim=1)
    return torch.stack([ends - lengths[tokens], ends], dim=-1)
