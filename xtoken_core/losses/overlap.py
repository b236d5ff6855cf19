"""Overlap ratio on completions: the common part of what student and teacher find likeliest next (arXiv 2604.13016)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.losses.base import Loss
from xtoken_core.losses.chain_loss import ChainLoss
from xtoken_core.losses.chunk_classes import generated_chunks
from xtoken_core.losses.common import NumberedBatch
from xtoken_core.losses.lazy_logits import Logits, WholeLogits, row_logits
from xtoken_core.losses.masks import generated_tokens, kept_chunk_ids
from xtoken_core.losses.same_tokenizer import SameTokenizerLoss
from xtoken_core.ops.numerics import upcast
from xtoken_core.topk_logits import TopKLogits

LIKELIEST = 16
"""Classes of each side that are compared."""
TOKENS = 256
"""Likeliest tokens of each side whose probabilities are summed by class."""
POSITIONS = 128
"""Maximum of positions of a step that are looked at."""
ROWS = 64
"""Positions whose logits are copied at once."""


@torch.no_grad()
def overlap_ratio(
    losses: Sequence[Loss],
    batch: Mapping[str, Tensor],
    student_logits: WholeLogits,
    teacher_logits: Sequence[Logits],
    *,
    positions: int = POSITIONS,
) -> dict[str, Tensor]:
    """Return the metric `overlap_ratio` of a micro-batch, on the device; none without a position to compare.

    At positions where both sides begin a token of a completion: of the `LIKELIEST` classes with the most probability
    among each side's `TOKENS` likeliest tokens, the fraction that is common; a mean over positions, then over teachers.
    A class is a token, with chain all tokens of one root. Other losses across tokenizers know no classes and have none.

    Args:
        losses: One per teacher.
        batch: A micro-batch on the host, where reading it waits for no device.
        student_logits: The student's whole head.
        teacher_logits: Each teacher's.
        positions: Maximum of positions, evenly spread.
    """
    batch = NumberedBatch(batch)
    ratios = []
    for loss, logits in zip(losses, teacher_logits, strict=True):
        if (rows := _rows(loss, batch)) is None or not (count := len(rows[0])):
            continue
        device = student_logits.device
        blocks = [torch.split(_on_device(side[:: -(-count // positions)], device), ROWS) for side in rows]
        if isinstance(loss, ChainLoss):
            roots, classes = [loss.tables.student.root, loss.tables.teacher.root], loss.tables.classes
        else:
            roots, classes = [torch.arange(loss.vocab_size, device=device)] * 2, loss.vocab_size
        width = min([LIKELIEST, classes, *([logits.ids.shape[-1]] if isinstance(logits, TopKLogits) else [])])
        sides = zip((student_logits.detach(), logits), roots, blocks, strict=True)
        students, teachers = (_likeliest(*side, classes, width) for side in sides)
        ratios.append((students.unsqueeze(2) == teachers.unsqueeze(1)).any(2).float().mean())
    return {"overlap_ratio": torch.stack(ratios).mean()} if ratios else {}


def _rows(loss: Loss, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return both sides' positions of one loss in the flattened batch; None if the ratio is not defined for it."""
    generated = generated_tokens(batch)
    if generated is None or not isinstance(loss, (ChainLoss, SameTokenizerLoss)):
        return None
    if isinstance(loss, SameTokenizerLoss):
        predicts = torch.nn.functional.pad(loss.tokens(batch).next_weights() > 0, (0, 1)) & generated
        return _indices(predicts), _indices(predicts)
    view = loss.view(batch)
    kept = view.valid & generated_chunks(generated, view)
    # Both sides have the same chunks in the same order, and so as many starts.
    sides = (kept_chunk_ids(ids, kept) for ids in (view.student_chunk_id, view.teacher_chunk_id))
    own, other = (_indices((ids >= 0) & (ids != torch.nn.functional.pad(ids, (1, -1), value=-1))) for ids in sides)
    return own, other


def _indices(mask: Bool[Tensor, "B T"]) -> Int[Tensor, " n"]:
    return torch.nonzero(mask.flatten()).squeeze(1)


def _on_device(rows: Tensor, device: torch.device) -> Tensor:
    # Out of memory that is not pinned, a copy may wait for the device.
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


def _likeliest(
    logits: Logits, root: Int[Tensor, " V"], blocks: Sequence[Tensor], classes: int, width: int
) -> Int[Tensor, "n k"]:
    """Return the classes with the most probability at each position, without the class of tokens without a root."""
    rows = logits.rows if isinstance(logits, TopKLogits) else row_logits(logits, len(root))
    found = []
    for block in blocks:
        at = rows(block)
        # By the likeliest tokens alone: a sum over the whole vocabulary takes several times as long.
        listed = (at.values, at.ids) if isinstance(at, TopKLogits) else at.topk(min(TOKENS, at.shape[-1]))
        values, tokens = listed[0][0], listed[1][0]
        mass = torch.softmax(upcast(values), -1).masked_fill((tokens < 0) | (tokens >= len(root)), 0.0)
        of_class = root[tokens.clamp(0, len(root) - 1)].long()
        sums = mass.new_zeros(len(block), classes + 1).scatter_add_(1, of_class, mass)
        found.append(sums[:, :-1].topk(width).indices)
    return torch.cat(found)
