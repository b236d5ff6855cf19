"""Lines of `eval.jsonl` for tests."""

import math
from typing import Any

SIZES = [900, 1100, 1000, 1000]
"""Bytes of the documents."""


def measured(bits: float | None, step: int = 0, apart: float = 0.0, **others: Any) -> dict[str, Any]:
    """Return a result on four documents, two of which are `apart` bits per byte above and two below the mean."""
    of_each = [(bits or 0.0) + sign * apart for sign in (1, 1, -1, -1)]
    nats = [each * size * math.log(2) for each, size in zip(of_each, SIZES, strict=True)]
    size = {"documents": len(SIZES), "bytes": sum(SIZES)}
    return {"step": step, "bits_per_byte": bits, **size, "group_bytes": SIZES, "group_nats": nats, **others}
