"""Coverage of a teacher by a projection: its tokens, and its probability, that no row names, in a text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.config import ModelSpec
from xtoken_core.projection.files import TopKProjection, read_topk
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.tokenizers.loading import load_tokenizer

WINDOW, MOST_WINDOWS = 256, 16
ROWS = 64
"""Positions whose probabilities are in memory at once."""


def coverage_of_text(file: Path, teacher: Path, text: str, *, mass: bool) -> dict[str, float]:
    """Measure the part of a text's teacher tokens, and with `mass` of the teacher's probability, that no row names.

    Args:
        file: The projection.
        teacher: Directory of the teacher.
        text: The text; the teacher is measured on its beginning.
        mass: The teacher is loaded and measured.

    Raises:
        InputError: The projection or the teacher cannot be read, or the teacher has no token for a character.
    """
    tokenizer = load_tokenizer(teacher, "teacher")
    ids = torch.from_numpy(TextTokenizer(tokenizer, "teacher").encode([text], specials=False)[0])
    named = named_tokens(read_topk(file), len(tokenizer))
    result = {"unnamed_tokens_of_text": unnamed_fraction(named, ids)}
    if mass:
        with torch.inference_mode():
            spec = ModelSpec(model=teacher, context_length=WINDOW)
            model = load_model(spec, "teacher", torch.device("cpu")).eval()  # type: ignore[no-untyped-call]
            before = ids.new_tensor(TextTokenizer(tokenizer, "teacher").ends[0])
            windows = ids[: WINDOW * MOST_WINDOWS].split(WINDOW - len(before))  # type: ignore[no-untyped-call]
            rows = (torch.cat([before, window])[None] for window in windows)
            logits = (model(input_ids=row, use_cache=False).logits[0] for row in rows)
            result["unreachable_mass"] = unreachable_mass(named, logits)
    return result


def named_tokens(projection: TopKProjection, teacher_vocab_size: int) -> Bool[Tensor, " V_t"]:
    """Return True for every teacher token that some row names with a weight above 0.

    Args:
        projection: The rows.
        teacher_vocab_size: `V_t`; ids beyond are ignored.
    """
    indices, weights = projection.indices, projection.likelihoods
    used = indices[(indices >= 0) & (indices < teacher_vocab_size) & (weights > 0)]
    return torch.bincount(used.long(), minlength=teacher_vocab_size) > 0


def unnamed_fraction(named: Bool[Tensor, " V_t"], ids: Int[Tensor, " n"]) -> float:
    """Return the fraction of a text's teacher tokens that no row names; 0 for an empty text.

    Args:
        named: The result of `named_tokens`.
        ids: Teacher tokens of the text.
    """
    return float((~named[ids]).float().mean()) if len(ids) else 0.0


def unreachable_mass(named: Bool[Tensor, " V_t"], logits: Iterable[Float[Tensor, "T V_m"]]) -> float:
    """Return the mean probability of the teacher on tokens that no row names: P-KL has no gradient for it.

    Args:
        named: The result of `named_tokens`.
        logits: The teacher's logits at the positions of texts; a head wider than the vocabulary is cut.
    """
    total, positions, unnamed = 0.0, 0, (~named).float()
    for of_text in logits:
        for rows in torch.split(of_text[:, : len(named)], ROWS):
            total += float((rows.float().softmax(dim=-1) @ unnamed).sum())
        positions += len(of_text)
    return total / max(positions, 1)
