"""The program that measures how many bytes of a text fit a context; it is run with `python -m`.

It reads JSON from standard input, with the tokenizers' directories and contexts and a sample of texts, and prints the
number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from xtoken_core.dataset.pieces import divide
from xtoken_core.errors import XtokenError
from xtoken_core.tokenizing import TextTokenizer, UnspellableError
from xtoken_services.common.processes.child_process import limit_memory
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


def main() -> int:
    """Read the sample, print the smallest number of bytes of all sides."""
    limit_memory()
    document = json.load(sys.stdin)
    try:
        limits = [
            piece_bytes(TextTokenizer(load_tokenizer(Path(directory), what), what), context, document["texts"])
            for what, directory, context in document["sides"]
        ]
    except XtokenError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{min(limits)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
