"""Coverage of a text by a projection: what of the teacher's tokens, and of its probability, no row names."""

from __future__ import annotations

from pathlib import Path

import torch

from xtoken_core.config import ModelSpec
from xtoken_core.projection.coverage import named_tokens, unnamed_fraction, unreachable_mass
from xtoken_core.projection.files import read_topk
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.tokenizers.loading import load_tokenizer

WINDOW, MOST_WINDOWS = 256, 16


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
