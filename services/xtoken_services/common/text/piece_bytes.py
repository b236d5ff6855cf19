"""The program that measures how many bytes of a text fit a context, in a child process.

Its request has the tokenizers' directories and contexts and a sample of texts, its result is the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xtoken_core.dataset.pieces import divide
from xtoken_core.tokenizing import TextTokenizer, UnspellableError
from xtoken_services.common.processes.child_process import Progress, answer_requests
from xtoken_services.common.tokenizers.loading import load_tokenizer

QUANTILE = 0.01
"""Fraction of the sample's stretches that may have fewer bytes per token than the bound."""
LEAST_BYTES = 16
STRETCH_BYTES = 3
"""Bytes, per token of the context, of the stretches that are measured: about as long as a piece, as the bytes per token
of short ones vary more."""


def piece_bytes(side: TextTokenizer, context: int, texts: Sequence[str]) -> int:
    """Return the bytes of a text that fit a context, by the bytes per token of a sample's densest stretches.

    Args:
        side: The tokenizer.
        context: Maximum of tokens.
        texts: The sample; texts that the tokenizer has no tokens for are left out, as the run skips them.

    Raises:
        UnspellableError: It has tokens for none of them.
    """
    ratios: list[float] = []
    unspellable: UnspellableError | None = None
    for text in texts:
        raw = text.encode()
        parts = [raw[begin:end] for begin, end in divide(raw, max(LEAST_BYTES, STRETCH_BYTES * context))]
        # The rest at a text's end is short, and its ratio says little; a text that is all rest counts.
        stretches = [part.decode() for part in (parts[:-1] or parts)]
        try:
            tokens = side.encode(stretches, specials=False)
        except UnspellableError as error:
            unspellable = error
            continue
        ratios += [len(s.encode()) / max(1, len(ids)) for s, ids in zip(stretches, tokens, strict=True)]
    if unspellable is not None and not ratios:
        raise unspellable
    ratios.sort()
    before, after = side.ends
    room = context - len(before) - len(after) - 1  # and the end of text
    return max(LEAST_BYTES, int(room * ratios[int(QUANTILE * len(ratios))]))


def main(request: dict[str, Any], _: Progress) -> int:
    """Return the smallest number of bytes of all sides of a request."""
    return min(
        piece_bytes(TextTokenizer(load_tokenizer(Path(directory), what), what), context, request["texts"])
        for what, directory, context in request["sides"]
    )


if __name__ == "__main__":
    answer_requests(main)
