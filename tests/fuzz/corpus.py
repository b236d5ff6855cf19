"""Kept inputs of a fuzz target: one text file per target with one input per line, in base64."""

import base64
from collections.abc import Iterable
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MAX_INPUTS, MAX_INPUT_BYTES, MAX_CORPUS_BYTES = 300, 2048, 48 << 10


def load(target: str) -> list[bytes]:
    """Return the kept inputs of a target."""
    path = CORPUS / f"{target}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def save(target: str, inputs: Iterable[bytes]) -> int:
    """Keep the smallest of these inputs, within the bounds of a corpus; return their number."""
    kept: list[str] = []
    left = MAX_CORPUS_BYTES
    for one in sorted(set(inputs), key=lambda data: (len(data), data))[:MAX_INPUTS]:
        line = base64.b64encode(one).decode()
        if len(one) > MAX_INPUT_BYTES or len(line) > left:
            break
        kept.append(line)
        left -= len(line) + 1
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{target}.txt").write_text("".join(f"{line}\n" for line in kept))
    return len(kept)
